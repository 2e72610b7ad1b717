// Reading and writing by index: gather, scatter, index_select, index, index_put, tril, triu.
#include "rules/registry.h"

namespace shardtensor::rules {

void register_indexing(Registry& r) {}

} // namespace shardtensor::rules
