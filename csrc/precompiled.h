// Torch's large headers, parsed once. Sources still include what they use. pybind11's headers are not here: with them, every
// source would compile pybind11's inner functions, used or not, which takes longer than most sources do.
#pragma once
#include <torch/csrc/python_headers.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
