# The libraries that link torch: core, Python bindings and, where torch_npu is installed, the NPU
# library. Folders are found without importing torch: an import of a torch that has torch_npu beside
# it fails on a machine without CANN.
set(locate "import importlib.util as u, sysconfig as s, os
def folder(n):
    spec = u.find_spec(n)
    return os.path.dirname(spec.origin) if spec and spec.origin else ''
print(';'.join([s.get_path('include'), s.get_config_var('EXT_SUFFIX'), folder('torch'), folder('torch_npu')]))")
execute_process(COMMAND ${NPU_KV_PYTHON} -c "${locate}" OUTPUT_VARIABLE found
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
list(GET found 0 python_include_dir)
list(GET found 1 python_ext_suffix)
if(NPU_KV_TORCH_DIR)
  set(torch_dir "${NPU_KV_TORCH_DIR}")
  set(torch_npu_dir "${NPU_KV_TORCH_NPU_DIR}")
else()
  list(GET found 2 torch_dir)
  list(GET found 3 torch_npu_dir)
endif()
if(NOT EXISTS "${torch_dir}/version.py")
  message(FATAL_ERROR "torch is not installed for ${NPU_KV_PYTHON}: install torch==2.13.0 first")
endif()
if(NOT EXISTS "${python_include_dir}/Python.h")
  message(FATAL_ERROR "${python_include_dir}/Python.h is missing: install Python's development files "
                      "(Debian, Ubuntu: apt-get install python3-dev)")
endif()

function(npu_kv_package_version folder variable)
  file(STRINGS "${folder}/version.py" line REGEX "^__version__ = ")
  string(REGEX REPLACE "^__version__ = '([^']+)'.*" "\\1" version "${line}")
  set(${variable} "${version}" PARENT_SCOPE)
endfunction()

npu_kv_package_version("${torch_dir}" torch_version)
set(torch_npu_version "")
if(torch_npu_dir)
  npu_kv_package_version("${torch_npu_dir}" torch_npu_version)
endif()

# pybind11 is the one inside torch: its headers are those that torch's own bindings were built with.
add_library(torch_headers INTERFACE)
target_include_directories(torch_headers SYSTEM INTERFACE
  ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
target_link_directories(torch_headers INTERFACE ${torch_dir}/lib)

function(npu_kv_library target rpath)
  npu_kv_warnings(${target})
  set_target_properties(${target} PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY ${NPU_KV_OUTPUT_DIR}/lib
    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "${rpath}")
endfunction()

# Writes <library>.json beside the library: what it was built against. npu_kv_ops.runtime compares
# that with the running versions before it loads the library.
function(npu_kv_built_against target json)
  set(file ${CMAKE_CURRENT_BINARY_DIR}/${target}.json)
  file(CONFIGURE OUTPUT ${file} CONTENT "${json}\n" @ONLY)
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${file})
  add_custom_command(TARGET ${target} POST_BUILD COMMAND ${CMAKE_COMMAND} -E copy
    ${file} $<TARGET_FILE_DIR:${target}>/${target}.json)
endfunction()

file(GLOB ops_sources CONFIGURE_DEPENDS ops/*.cpp)
if(ops_sources)
  add_library(npu_kv_core SHARED ${ops_sources})
  target_link_libraries(npu_kv_core
    PRIVATE -Wl,--whole-archive npu_kv_transfer -Wl,--no-whole-archive torch torch_cpu c10
    PUBLIC torch_headers)
  target_include_directories(npu_kv_core PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  npu_kv_library(npu_kv_core "$ORIGIN")
  target_link_options(npu_kv_core PRIVATE -Wl,--no-undefined)
  npu_kv_built_against(npu_kv_core "{\"torch\": \"${torch_version}\"}")

  file(GLOB binding_sources CONFIGURE_DEPENDS bindings/*.cpp)
  if(binding_sources)
    add_library(_C MODULE ${binding_sources})
    target_include_directories(_C SYSTEM PRIVATE ${python_include_dir})
    target_link_libraries(_C PRIVATE npu_kv_core torch torch_cpu torch_python c10)
    npu_kv_library(_C "$ORIGIN/lib")
    set_target_properties(_C PROPERTIES PREFIX "" SUFFIX "${python_ext_suffix}"
      LIBRARY_OUTPUT_DIRECTORY ${NPU_KV_OUTPUT_DIR})
  endif()
endif()

file(GLOB npu_sources CONFIGURE_DEPENDS ops/npu/*.cpp runtime/acl/*.cpp)
if(torch_npu_dir AND npu_sources)
  add_library(npu_kv_npu SHARED ${npu_sources})
  target_include_directories(npu_kv_npu SYSTEM PRIVATE
    ${torch_npu_dir}/include ${torch_npu_dir}/include/third_party/acl/inc
    ${torch_npu_dir}/include/third_party/hccl/inc)
  target_link_directories(npu_kv_npu PRIVATE ${torch_npu_dir}/lib)
  # The ACL symbols come from whichever runtime torch_npu itself loaded, so they stay undefined here.
  target_link_libraries(npu_kv_npu PRIVATE npu_kv_core torch torch_cpu c10 torch_npu
    -Wl,--unresolved-symbols=ignore-all)
  npu_kv_library(npu_kv_npu "$ORIGIN")
  npu_kv_built_against(npu_kv_npu
    "{\"torch\": \"${torch_version}\", \"torch_npu\": \"${torch_npu_version}\"}")
endif()

# Compute operators of the simulated NPU: opened by libascendcl.so of the simulator when it needs them.
file(GLOB kernel_sources CONFIGURE_DEPENDS simulator/kernels/*.cpp)
add_library(npu_kv_sim_kernels SHARED ${kernel_sources})
target_include_directories(npu_kv_sim_kernels PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/simulator)
target_link_libraries(npu_kv_sim_kernels PRIVATE torch_headers torch torch_cpu c10)
npu_kv_library(npu_kv_sim_kernels "$ORIGIN")
target_link_options(npu_kv_sim_kernels PRIVATE -Wl,--no-undefined)
