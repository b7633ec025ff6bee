"""Replays a trace of requests through a device pool and a host pool of KV blocks.

The modules here do one thing each: `trace` and `synthetic` give requests, `models` says how many
bytes a block has, `sizing` fits both pools into memory, `pools` decides what is hit, loaded, stored
and evicted, `patterns` writes and checks contents, `movers` copies blocks with the operator or with
the copy backend, `ordering` keeps copies and computing from overtaking each other, `engine` runs it
all, `report` and `plot` show what happened.
Importing any of them does not import torch.
"""
