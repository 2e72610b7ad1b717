#include "bindings/bindings.h"

#include "autograd/functions.h"
#include "dispatch/cache.h"
#include "dispatch/check.h"
#include "dispatch/eager_scalar_reduce.h"
#include "dispatch/foreign_ops.h"
#include "dispatch/handler.h"
#include "dispatch/plain_tensors.h"
#include "redistribute/watch.h"
#include "rules/registry.h"
#include "rules/windows.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>

namespace shardtensor::bindings {

namespace {

void tell_of_fallback(const std::string& op, const char* why, const std::string& layouts) {
  listener_for<on_gather>().tell([&] { return py::make_tuple(op, why, layouts); });
}

// The lines of the user's script that have made sums of no dims. Guarded by the GIL.
struct ScriptLines {
  std::vector<std::string> own; // the folders of torch and of this package, whose frames do not count
  std::unordered_map<uint64_t, std::string> texts;

  bool is_own(std::string_view file) const {
    return std::any_of(
        own.begin(), own.end(), [&](const std::string& folder) { return file.substr(0, folder.size()) == folder; });
  }
};
ScriptLines& script_lines() {
  static auto* lines = new ScriptLines(); // never destroyed: the interpreter may be gone by then
  return *lines;
}

// A number for the two innermost frames of the user's script (the second distinguishes the calls of a function). Ranks may have
// the script in different folders. This runs for each sum of no dims, so it makes a text only for a new line.
uint64_t script_line() {
  if (!Py_IsInitialized()) {
    return 0;
  }
  const py::gil_scoped_acquire gil;
  auto& lines = script_lines();
  uint64_t out = 0;
  std::pair<py::object, int> first;
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  for (int found = 0; frame && found < 2;) {
    auto* now = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(now)));
    Py_ssize_t size = 0;
    const auto* name = PyUnicode_AsUTF8AndSize(reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename, &size);
    if (!name) {
      PyErr_Clear();
      break;
    }
    const std::string_view file(name, size);
    if (!lines.is_own(file)) {
      const auto line = PyFrame_GetLineNumber(now);
      out = c10::hash_combine(out, std::hash<std::string_view>()(file.substr(file.rfind('/') + 1)));
      out = c10::hash_combine(out, static_cast<size_t>(line));
      if (found++ == 0) {
        first = {code, line};
      }
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(now)));
  }
  if (first.first && !lines.texts.count(out)) {
    const auto file = py::reinterpret_borrow<py::str>(reinterpret_cast<PyCodeObject*>(first.first.ptr())->co_filename);
    lines.texts.emplace(out, c10::str(std::string(file), ":", first.second));
  }
  return out;
}

std::string text_of_line(uint64_t line) {
  const py::gil_scoped_acquire gil;
  const auto& texts = script_lines().texts;
  const auto it = texts.find(line);
  return it == texts.end() ? "" : it->second;
}

} // namespace

void register_dispatch(py::module& m) {
  m.def("install_handler", [] {
    const auto count = install_handler();
    promote.set([](const at::Tensor& t, const LayoutPtr& layout) {
      return as_shard_tensor(t) ? with_sharded_gradient(t) : from_local(t, layout, t.sym_sizes(), t.sym_strides());
    });
    return count;
  });
  m.def("update_foreign_op", &update_foreign_op);
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
  m.def("set_own_folders", [](std::vector<std::string> folders) {
    script_lines().own = std::move(folders);
    line_of_script.set(&script_line);
    text_of_script.set(&text_of_line);
  });
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
  m.def("min_overlap_bytes", &rules::min_overlap_bytes);
  m.def("set_min_overlap_bytes", &rules::set_min_overlap_bytes);
  m.def("checking", [] { return static_cast<int>(checking()); });
  m.def("set_checking", [](int how) { set_checking(static_cast<CheckingMode>(how)); });
  def_observer<on_gather, &tell_of_fallback>(m, "set_fallback_log");
  m.def("cache_info", [] {
    const auto i = cache_info();
    return py::dict(
        py::arg("hits") = i.hits, py::arg("misses") = i.misses, py::arg("entries") = i.entries, py::arg("threads") = i.threads);
  });
  m.def("clear_cache", &clear_cache);
  m.def("rules", [] {
    py::dict out;
    for (const auto& [name, entry] : rules::registry().entries()) {
      if (entry.is_formula()) {
        continue;
      }
      const char* kind = entry.options.way == rules::Way::Refused ? "refused" : entry.gathers() ? "gathers" : "rule";
      out[py::str(name)] = py::make_tuple(entry.family, kind);
    }
    return out;
  });
}

} // namespace shardtensor::bindings
