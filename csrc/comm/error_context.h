// What this thread is doing: the context of errors, and of messages about ranks that are late. Also tells the other ranks if
// this rank fails.
#pragma once

#include "layout/layout.h"
#include "layout/observer.h"

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <string>

namespace shardtensor::comm {

// The tensor that moves. Non-owning.
struct MoveContext {
  const Layout* from = nullptr; // null: the frame is no move
  const Layout* to = nullptr;
  size_t tensors = 1; // how many move together; `from` and `to` are those of the first
};

// One level of what this thread is doing: an op, or a move that communicates. Its text is made only when it is needed.
class Frame {
 public:
  explicit Frame(c10::function_ref<std::string()> text, MoveContext move = {});
  ~Frame();
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

 private:
  friend std::string doing_now();
  friend std::string moving_now();
  c10::function_ref<std::string()> text_;
  MoveContext move_;
  const Frame* outer_;
};
// The texts of this thread's frames, from the inside out, and the line of the user's script.
std::string doing_now();
// The move of this thread: "S(0)->R", or "S(0)->R and 2 more"; empty if nothing moves.
std::string moving_now();

// " at FILE:LINE" of the user's script, or "".
std::string call_site();
inline Observer<std::string()> find_call_site; // "FILE:LINE"; set at import

// Call it in a catch block, if the other ranks may not have failed. Tells them, once for each exception, that `doing`, with the
// layouts, failed on this rank (desync.h). Also skips the collectives that were still due along the mesh dims in `due` (bits),
// so that ranks keep counting alike.
void tell_failure(const std::string& doing, const Mesh& mesh, uint64_t due) noexcept;

// How many collectives this thread has begun.
int64_t begun();

// Runs `run`, which communicates. If it fails, the error keeps its class and gets the text and the rank as context. The text must
// be the same on all ranks: ranks that fail alike then need not wait for each other. due(): see tell_failure().
template <typename Run, typename Text, typename Due>
decltype(auto) with_error_context(const Mesh& mesh, const Text& text, const Run& run, const Due& due, MoveContext move = {}) {
  const Frame frame(text, move);
  try {
    return run();
  } catch (c10::Error& e) {
    e.add_context(c10::str(text(), ", rank ", mesh.rank()));
    tell_failure(doing_now(), mesh, due());
    throw;
  } catch (...) {
    tell_failure(doing_now(), mesh, due());
    throw;
  }
}

} // namespace shardtensor::comm
