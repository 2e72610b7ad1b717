// Users' choices: which plain tensors are allowed, and whether ops may gather.
#pragma once

#include <cstdint>
#include <optional>

namespace shardtensor {

// How to treat plain tensors of one dim or more among ShardTensors; 0-d plain tensors are always replicated.
enum class Promotion : uint8_t { Error, Warn, Replicate };

// A mode that a thread may set for itself. torch passes it on to the autograd threads that run the thread's backward.
class ThreadMode {
 public:
  explicit constexpr ThreadMode(const char* name) : name_(name) {}
  std::optional<int> get() const;
  void set(std::optional<int> value) const; // 0 to 2

 private:
  const char* name_;
};

inline constexpr ThreadMode kOwnPromotion{"shardtensor.promotion"};
inline constexpr ThreadMode kPlainTargets{"shardtensor.plain_targets"}; // losses of class labels take plain targets and weights

// The mode of threads that have set none.
Promotion common_promotion();
void set_common_promotion(Promotion mode);
Promotion promotion(); // this thread's

// While it lives, plain tensors count as replicated on this thread, whatever the mode.
class AsReplicatedGuard {
 public:
  AsReplicatedGuard();
  ~AsReplicatedGuard();
  AsReplicatedGuard(const AsReplicatedGuard&) = delete;
  AsReplicatedGuard& operator=(const AsReplicatedGuard&) = delete;
  static bool alive();
};

// Whether an op without a rule raises (strict) or gathers its inputs. Process-wide.
bool strict_mode();
void set_strict_mode(bool strict);

// All modes above as one number; 0 if none was set.
int64_t state_of_modes();

} // namespace shardtensor
