// libascend_protobuf.so: torchair names it and uses nothing of it.
