#include "comm/doing.h"

#include <atomic>

namespace shardtensor::comm {

namespace {
thread_local const Frame* t_frame = nullptr;
std::atomic<CallSite> g_call_site{nullptr};
} // namespace

Frame::Frame(c10::function_ref<std::string()> text) : text_(text), outer_(t_frame) {
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

std::string call_site() {
  const auto ask = g_call_site.load();
  const auto text = ask ? ask() : "";
  return text.empty() ? "" : " at " + text;
}
void set_call_site(CallSite ask) {
  g_call_site = ask;
}

} // namespace shardtensor::comm
