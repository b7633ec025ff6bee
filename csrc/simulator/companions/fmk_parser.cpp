// libfmk_parser.so: torchair names it and uses nothing of it.
