// Ops that run on local tensors together with their autograd: torch's gradient formula, or the op itself, writes into plain
// tensors or reads values, which ShardTensors do not allow.
#pragma once

namespace shardtensor {

// Registers these ops (their entry says so) at the autograd key. Call it after install_handler(). The ops write no argument and
// return no view.
void install_local_ops();

} // namespace shardtensor
