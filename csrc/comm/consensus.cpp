#include "comm/consensus.h"

#include "comm/error_context.h"

#include <cstring>
#include <map>
#include <sstream>

namespace shardtensor::comm {

namespace {

constexpr int64_t kText = 1024;

// The text of each rank, in the order of the coordinates.
std::vector<std::string> gathered(const std::string& text, const Mesh& mesh, uint64_t over) {
  auto mine = at::zeros({kText}, at::kByte);
  std::strncpy(static_cast<char*>(mine.data_ptr()), text.c_str(), kText - 1);
  auto all = mine.to(device_of(mesh));
  for (int64_t m = mesh.ndim() - 1; m >= 0; --m) {
    if (over >> m & 1) {
      auto room = at::empty({mesh.size(m), all.numel()}, all.options());
      auto pieces = room.unbind(0);
      all_gather(pieces, all, mesh, m);
      all = room.view(-1);
    }
  }
  all = all.cpu();
  std::vector<std::string> out;
  for (int64_t at = 0; at < all.numel(); at += kText) {
    out.emplace_back(static_cast<const char*>(all.data_ptr()) + at);
  }
  return out;
}

} // namespace

std::string by_rank(const std::string& text, const Mesh& mesh, uint64_t over) {
  std::vector<std::string> texts; // in the order of their first appearance
  std::map<std::string, std::vector<std::string>> ranks;
  for (const auto& both : gathered(c10::str(mesh.rank(), ":", text), mesh, over)) {
    std::istringstream in(both);
    std::string rank, its;
    std::getline(in, rank, ':');
    std::getline(in, its, '\0');
    auto& of_text = ranks[its];
    if (of_text.empty()) {
      texts.push_back(its);
    }
    of_text.push_back(rank);
  }
  std::ostringstream out;
  for (const auto& its : texts) {
    out << "\n  rank " << c10::Join(" ", ranks[its]) << ": " << its;
  }
  return out.str();
}

std::string differences(const std::string& text, const Mesh& mesh, uint64_t over) {
  const auto hash = static_cast<int64_t>(std::hash<std::string>()(text) >> 1);
  const auto [most, least] = largest<2>(mesh, {hash, -hash}, over);
  return most == -least ? "" : by_rank(text + call_site(), mesh, over);
}

} // namespace shardtensor::comm
