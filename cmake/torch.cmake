# Asks the interpreter's torch where its headers and libraries are, and defines `torch_python_api` with all it takes to
# compile and link an extension module.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import torch, os; r = os.path.dirname(torch.__file__); print(r, torch.__version__, int(torch.compiled_with_cxx11_abi()), torch.version.cuda or 'OFF', sep=';')"
  OUTPUT_VARIABLE TORCH_FACTS OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE FAILED ERROR_VARIABLE WHY)
if(FAILED)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch, which shardtensor is built against:\n${WHY}")
endif()
list(GET TORCH_FACTS 0 TORCH_ROOT)
list(GET TORCH_FACTS 1 TORCH_VERSION)
list(GET TORCH_FACTS 2 TORCH_ABI)
list(GET TORCH_FACTS 3 TORCH_CUDA)
if(TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "shardtensor needs torch 2.11 or newer; ${Python_EXECUTABLE} has ${TORCH_VERSION}")
endif()
set(TORCH_HAS_CUDA ${TORCH_CUDA}) # its version, or OFF
message(STATUS "torch ${TORCH_VERSION} in ${TORCH_ROOT}, CUDA: ${TORCH_CUDA}")

add_library(torch_python_api INTERFACE)
target_include_directories(torch_python_api SYSTEM INTERFACE
  ${TORCH_ROOT}/include ${TORCH_ROOT}/include/torch/csrc/api/include ${Python_INCLUDE_DIRS})
target_compile_definitions(torch_python_api INTERFACE _GLIBCXX_USE_CXX11_ABI=${TORCH_ABI} USE_DISTRIBUTED USE_C10D_GLOO)
target_link_directories(torch_python_api INTERFACE ${TORCH_ROOT}/lib)
target_link_libraries(torch_python_api INTERFACE c10 torch torch_cpu torch_python)
