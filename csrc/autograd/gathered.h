// Ops run as a whole on local tensors, autograd and all: torch's formula for them, or their own body, writes into plain tensors
// or reads values, which ShardTensors do not allow. The local tensors are pieces where the op has a rule, else the gathered
// inputs.
#pragma once

namespace shardtensor {

// Takes the ops that the registry says so of (Options.gather) at the autograd key; after install_handler(). They write no
// argument and return no view.
void install_gathered();

} // namespace shardtensor
