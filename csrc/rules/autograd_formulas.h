// The autograd formulas of ops whose gradients are not torch's. An entry names its op's formula (Options::autograd). The comment
// above a group of formulas names the file in autograd/ that defines them.
#pragma once

namespace torch {
class CppFunction;
} // namespace torch

namespace shardtensor {

struct Op;

// Makes the kernel that the handler registers for the op at the autograd key.
using Formula = torch::CppFunction (*)(const Op&);

namespace formulas {

// attention.cpp
extern const Formula attention, attention_math;
// composites.cpp
extern const Formula cat, combinations, cross_entropy, embedding, factored, fill_diagonal_, integers, linear, loss_of_labels,
    matmul, max_pool1d, mean, mean_dim, nanquantile, nanquantile_number, pad_sequence, quantile, quantile_number, tensor_split,
    to_copy, trace_backward, vander;
// einsum.cpp
extern const Formula einsum;
// gradients.cpp
extern const Formula add_, detach, has_same_storage, new_empty_strided, with_zeros;
// local_autograd.cpp
extern const Formula local_autograd;
// double_backward.cpp
extern const Formula convolution_backward, through_windows;
// product_backward.cpp
extern const Formula cummaxmin_backward, cumprod_backward, cumsum, prod, prod_dim, value_selecting_reduction_backward;
// circular_pad_roll.cpp
extern const Formula flip, pad_circular, repeat, roll;
// spectral.cpp
extern const Formula fft_r2c, istft, stft;
// unpool.cpp
extern const Formula max_unpool2d, max_unpool3d;

} // namespace formulas

} // namespace shardtensor
