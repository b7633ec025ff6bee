// libgraph.so: named by torch_npu and torchair; its functions live in libge_runner.so here.
