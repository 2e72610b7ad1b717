#include "bindings/bindings.h"

#include "autograd/functions.h"
#include "autograd/local_ops.h"
#include "dispatch/ahead.h"
#include "dispatch/check.h"
#include "dispatch/handler.h"
#include "dispatch/others.h"
#include "dispatch/plain.h"
#include "redistribute/watch.h"
#include "rules/registry.h"
#include "rules/windows.h"

namespace shardtensor::bindings {

namespace {

void tell_of_fallback(const std::string& op, const char* why, const std::string& layouts) {
  ear_for<FallbackLog>().tell([&] { return py::make_tuple(op, why, layouts); });
}

} // namespace

void register_dispatch(py::module& m) {
  m.def("install_handler", [] {
    const auto count = install_handler();
    install_local_ops();
    set_entrance([](const at::Tensor& t, const LayoutPtr& layout) {
      return as_shard_tensor(t) ? with_sharded_gradient(t) : from_local(t, layout, t.sym_sizes(), t.sym_strides());
    });
    return count;
  });
  m.def("settle_op", &settle_op);
  m.def("common_promotion", [] { return static_cast<int>(common_promotion()); });
  m.def("set_common_promotion", [](int mode) { set_common_promotion(static_cast<Promotion>(mode)); });
  m.def("state_of_modes", &state_of_modes);
  m.def("own_promotion", [] { return kOwnPromotion.get(); });
  m.def("set_own_promotion", [](std::optional<int> mode) { kOwnPromotion.set(mode); });
  m.def("plain_targets", [] { return kPlainTargets.get(); });
  m.def("set_plain_targets", [](std::optional<int> allowed) { kPlainTargets.set(allowed); });
  m.def("strict_mode", &strict_mode);
  m.def("set_strict_mode", &set_strict_mode);
  m.def("reduces_ahead", &reduces_ahead);
  m.def("set_reduces_ahead", &set_reduces_ahead);
  m.def("reduces_once", &reduces_once);
  m.def("set_reduces_once", &set_reduces_once);
  m.def("sums", &how_many_sums);
  m.def("sums_near", [](const at::Tensor& t) {
    std::vector<std::pair<std::string, int64_t>> out;
    for (const auto& sum : sums_near(shard_tensor(t, "kept"))) {
      out.emplace_back(sum.layout->str(), static_cast<int64_t>(sum.local.nbytes()));
    }
    return out;
  });
  m.def("second_call", &rules::second_call);
  m.def("set_second_call", &rules::set_second_call);
  m.def("checking", [] { return static_cast<int>(checking()); });
  m.def("set_checking", [](int how) { set_checking(static_cast<Checking>(how)); });
  m.def("set_fallback_log", [](py::object f) {
    auto& ear = ear_for<FallbackLog>();
    ear.set(std::move(f));
    set_fallback_log(ear.listens() ? &tell_of_fallback : nullptr);
  });
  m.def("cache_info", [] {
    const auto i = cache_info();
    return py::dict(
        py::arg("hits") = i.hits, py::arg("misses") = i.misses, py::arg("entries") = i.entries, py::arg("threads") = i.threads);
  });
  m.def("clear_cache", &clear_cache);
  m.def("rules", [] {
    py::dict out;
    for (const auto& [name, entry] : rules::registry().entries()) {
      const char* kind = entry.options.way == rules::Way::Refused ? "refused" : entry.gathers() ? "gathers" : "rule";
      out[py::str(name)] = py::make_tuple(entry.family, kind);
    }
    return out;
  });
}

} // namespace shardtensor::bindings
