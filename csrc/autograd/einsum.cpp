// einsum of two ShardTensors. torch flattens the letters that both have, those that only one has and those that are summed over,
// each into one dim of a batch of matrices. Of a flattened run only the first dim stays cut. Where that would move a cut, this
// multiplies with the shared letters as dims of their own. Uses tensor/.
#include "autograd/make_formula.h"
#include "tensor/shard_tensor.h"

#include <ATen/ATen.h>
#include <ATen/ops/einsum_compositeimplicitautograd_dispatch.h>

#include <algorithm>
#include <cctype>
#include <string>

namespace shardtensor {

namespace {

using at::Tensor;

// "left,right->out".
struct Equation {
  std::string left, right, out;
};

bool has(const std::string& letters, char c) {
  return letters.find(c) != std::string::npos;
}
bool are_letters(const std::string& text) {
  auto sorted = text;
  std::sort(sorted.begin(), sorted.end());
  return std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isalpha(c); }) &&
         std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

// Nothing if the equation has not exactly two operands, has dots or repeated letters, or if torch refuses it.
std::optional<Equation> parse(c10::string_view given) {
  std::string text(given);
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  const auto arrow = text.find("->"), comma = text.find(',');
  if (comma == std::string::npos || comma > arrow) {
    return std::nullopt;
  }
  Equation e{text.substr(0, comma), text.substr(comma + 1, arrow == std::string::npos ? arrow : arrow - comma - 1), {}};
  if (arrow != std::string::npos) {
    e.out = text.substr(arrow + 2);
  } else { // the letters that occur once
    for (const auto c : e.left + e.right) {
      if (has(e.left, c) != has(e.right, c)) {
        e.out += c;
      }
    }
    std::sort(e.out.begin(), e.out.end());
  }
  const bool known = std::all_of(e.out.begin(), e.out.end(), [&](char c) { return has(e.left, c) || has(e.right, c); });
  return known && are_letters(e.left) && are_letters(e.right) && are_letters(e.out) ? std::optional(std::move(e)) : std::nullopt;
}

// One operand.
struct EinsumOperand {
  Tensor t;
  std::string letters;

  c10::SymInt size(char c) const {
    return t.sym_size(static_cast<int64_t>(letters.find(c)));
  }
  bool cuts(char c) const {
    return has(letters, c) && as_shard_tensor(t)->layout().shards(static_cast<int64_t>(letters.find(c)));
  }
  // Sums over `gone`. The result has the dims `batch`, then one dim for each of the other two strings.
  Tensor as_matrices(
      const std::string& gone, const std::string& batch, const std::string& rows, const std::string& columns) const {
    std::vector<int64_t> order, sums;
    std::vector<c10::SymInt> sizes;
    for (const auto c : batch) {
      sizes.push_back(size(c));
    }
    for (const auto& group : {rows, columns}) {
      c10::SymInt all = 1;
      for (const auto c : group) {
        all = all * size(c);
      }
      sizes.push_back(all);
    }
    for (const auto c : batch + rows + columns + gone) {
      order.push_back(static_cast<int64_t>(letters.find(c)));
    }
    for (size_t i = 0; i < gone.size(); ++i) {
      sums.push_back(-1 - static_cast<int64_t>(i));
    }
    const auto ordered = t.permute(order);
    return (sums.empty() ? ordered : ordered.sum(sums)).reshape_symint(sizes);
  }
};

// The letters, grouped by where they occur; within a group, in the order of the result or of the alphabet.
struct Groups {
  std::string batch, rows, columns, summed, left_only, right_only;
};

Groups groups_of(const Equation& e) {
  Groups g;
  auto rest = e.left + e.right;
  std::sort(rest.begin(), rest.end());
  rest.erase(std::unique(rest.begin(), rest.end()), rest.end());
  for (const auto c : e.out) {
    (has(e.left, c) ? has(e.right, c) ? g.batch : g.rows : g.columns) += c;
  }
  for (const auto c : rest) {
    if (!has(e.out, c)) {
      (has(e.left, c) ? has(e.right, c) ? g.summed : g.left_only : g.right_only) += c;
    }
  }
  return g;
}

// `t` has a dim for each letter of `have`; returns it with its dims in the order of `want`.
Tensor permuted(const Tensor& t, const std::string& have, const std::string& want) {
  std::vector<int64_t> order;
  for (const auto c : want) {
    order.push_back(static_cast<int64_t>(have.find(c)));
  }
  return t.permute(order);
}

Tensor einsum(c10::string_view text, at::TensorList operands, at::OptionalIntArrayRef path) {
  const auto by_torch = [&] { return at::compositeimplicitautograd::einsum(text, operands, path); };
  const auto e =
      operands.size() == 2 && as_shard_tensor(operands[0]) && as_shard_tensor(operands[1]) ? parse(text) : std::nullopt;
  if (!e || operands[0].dim() != static_cast<int64_t>(e->left.size()) ||
      operands[1].dim() != static_cast<int64_t>(e->right.size())) {
    return by_torch();
  }
  const EinsumOperand left{operands[0], e->left}, right{operands[1], e->right};
  const auto g = groups_of(*e);
  const auto is_cut = [&](char c) { return left.cuts(c) || right.cuts(c); };
  const auto loses = [&](const std::string& group) {
    return group.size() > 1 && std::any_of(group.begin() + 1, group.end(), is_cut);
  };
  if (!loses(g.batch) && !loses(g.rows) && !loses(g.columns) && !loses(g.summed)) {
    return by_torch();
  }
  for (const auto c : g.batch + g.summed) {
    if (left.size(c) != right.size(c)) {
      return by_torch(); // broadcast, or refused
    }
  }
  const auto cut_first = [&](std::string group) {
    std::stable_partition(group.begin(), group.end(), is_cut);
    return group;
  };
  const auto rows = cut_first(g.rows), columns = cut_first(g.columns), summed = cut_first(g.summed);
  auto out =
      at::matmul(left.as_matrices(g.left_only, g.batch, rows, summed), right.as_matrices(g.right_only, g.batch, summed, columns));
  std::vector<c10::SymInt> sizes;
  for (const auto c : g.batch + rows + columns) {
    sizes.push_back(has(e->left, c) ? left.size(c) : right.size(c));
  }
  out = out.reshape_symint(sizes);
  const auto in_memory = g.batch + g.rows + g.columns; // of torch's result
  if (rows != g.rows || columns != g.columns) {
    out = permuted(out, g.batch + rows + columns, in_memory).contiguous();
  }
  return permuted(out, in_memory, e->out);
}

} // namespace

const Formula formulas::einsum = formula<&shardtensor::einsum>;

} // namespace shardtensor
