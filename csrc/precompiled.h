// Torch's large headers, parsed once. Sources still include what they use. A header is not here if few sources need it: each
// source instantiates the templates that a header's inline functions use, needed or not (ProcessGroup.hpp takes 1.4 s a source,
// custom_function.h 1.1 s, pybind11 longer than most sources do).
#pragma once
#include <torch/csrc/python_headers.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
