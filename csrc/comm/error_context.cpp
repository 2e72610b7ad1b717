#include "comm/error_context.h"

namespace shardtensor::comm {

namespace {
thread_local const Frame* t_frame = nullptr;

std::string placements_of(const Layout& layout) {
  std::string out;
  for (const auto& placement : layout.placements()) {
    out += out.empty() ? "" : " ";
    out += placement.str();
  }
  return out;
}
} // namespace

Frame::Frame(c10::function_ref<std::string()> text, MoveContext move) : text_(text), move_(move), outer_(t_frame) {
  t_frame = this;
}
Frame::~Frame() {
  t_frame = outer_;
}

std::string doing_now() {
  std::string out;
  for (const auto* frame = t_frame; frame; frame = frame->outer_) {
    out += (out.empty() ? "" : ", ") + frame->text_();
  }
  return out + call_site();
}

std::string moving_now() {
  for (const auto* frame = t_frame; frame; frame = frame->outer_) {
    if (const auto& move = frame->move_; move.from) {
      const auto more = move.tensors > 1 ? c10::str(" and ", move.tensors - 1, " more") : "";
      return c10::str(placements_of(*move.from), "->", placements_of(*move.to), more);
    }
  }
  return "";
}

std::string call_site() {
  const auto text = find_call_site();
  return text.empty() ? "" : " at " + text;
}

} // namespace shardtensor::comm
