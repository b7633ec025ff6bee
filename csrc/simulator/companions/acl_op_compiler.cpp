// libacl_op_compiler.so: torch_npu names it and looks functions up on its handle. They are defined
// in libascendcl.so (api/operator.cpp, api/options.cpp), which this library needs.
