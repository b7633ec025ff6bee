"""Replays a trace of requests through a device pool and a host pool of KV blocks.

The modules here do one thing each: `trace` and `synthetic` give requests, `models` says how many
bytes a block has, `sizing` fits both pools into memory, `pools` decides what is hit, loaded, stored
and evicted, `patterns` writes and checks contents, `ordering` keeps streams from overtaking each
other, `engine` moves the bytes through the operator, `report` and `plot` show what happened.
Importing any of them does not import torch.
"""
