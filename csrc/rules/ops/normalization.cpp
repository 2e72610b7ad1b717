// Normalisation: the dims that share statistics are factors with a kernel, which sums over the ranks; other dims may be cut.
// Only sums are sent: two small all-reduces forward, one backward.
#include "comm/comm.h"
#include "rules/kernel_utils.h"
#include "rules/registry.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

namespace shardtensor::rules {

namespace {

using c10::IValue;

// ---- what all norms share ----

// A group of `count` values that share statistics: those along `dims`, on every rank along the mesh dims `over`.
struct StatsGroup {
  std::vector<int64_t> dims;
  uint64_t over;
  c10::SymFloat count;
  const Mesh& mesh;

  // Keeps the dims, so that the result broadcasts.
  at::Tensor mean(const at::Tensor& t) const {
    auto sum = t.sum(dims, /*keepdim=*/true).contiguous();
    comm::all_reduce_over(sum, mesh, over, ReduceOp::Sum);
    return sum.div_(at::Scalar(count));
  }
};

// In two passes: the difference of two large sums would lose all digits.
struct NormOutputs {
  at::Tensor mean, variance, rstd, value;
};
NormOutputs normalize(const at::Tensor& x, const StatsGroup& group, double eps) {
  NormOutputs n;
  n.mean = group.mean(x);
  const auto centered = x - n.mean;
  n.variance = group.mean(centered.square());
  n.rstd = (n.variance + eps).rsqrt_();
  n.value = centered * n.rstd;
  return n;
}

// The gradient of x from that of the normalised value; `centered`: the mean was subtracted.
at::Tensor normalize_backward(
    const at::Tensor& grad, const at::Tensor& value, const at::Tensor& rstd, const StatsGroup& group, bool centered) {
  if (!centered) {
    return rstd * (grad - value * group.mean(grad * value));
  }
  const auto means = group.mean(at::stack({grad, grad * value}, -1));
  return rstd * (grad - means.select(-1, 0) - value * means.select(-1, 1));
}

at::Tensor wide(const at::Tensor& t) {
  return t.to(at::toOpMathType(t.scalar_type()));
}

// With full-precision weights, half precision keeps its statistics in full precision, as in torch.
at::ScalarType statistics_type(const at::Tensor& x, const at::Tensor& weight) {
  const bool mixed = weight.defined() && weight.scalar_type() != x.scalar_type();
  return x.is_cpu() && !mixed ? x.scalar_type() : at::toOpMathType(x.scalar_type());
}

// A call's arguments by name.
struct Arguments {
  const KernelRun& run;

  const IValue& operator[](const char* name) const {
    return run.arg(argument(run, name));
  }
  // By whichever of two names the op has.
  const IValue& either(const char* name, const char* otherwise) const {
    return (*this)[argument(run, name) >= 0 ? name : otherwise];
  }
  // Undefined if it is None, or if the op has no such argument.
  at::Tensor tensor(const char* name) const {
    const auto i = argument(run, name);
    return i >= 0 && run.arg(i).isTensor() ? run.arg(i).toTensor() : at::Tensor();
  }
  bool wants(size_t result) const {
    const auto i = argument(run, "output_mask");
    return i < 0 || run.arg(i).toBoolList()[result];
  }
};

// The result of a norm: the normalised value, scaled and shifted if the call has tensors for that. `shape` makes them
// broadcast.
template <typename Shape>
at::Tensor scaled(const at::Tensor& value, const Arguments& args, const Shape& shape) {
  const auto weight = args.tensor("weight"), bias = args.tensor("bias");
  const auto out = weight.defined() ? value * shape(weight) : value;
  return bias.defined() ? out + shape(bias) : out;
}

const std::string& name_of(const Call& call, const TensorArg& t) {
  return call.schema.arguments()[t.arg].name();
}

// The dims of the input, of the weight and bias, and of the statistics.
struct NormDims {
  Dims full, weight, statistics;
};

// Those of each operand, by its name.
void add_operands(const Call& call, Rule& rule, const NormDims& dims) {
  for (const auto& t : call.tensors) {
    const auto& name = name_of(call, t);
    rule.operands.emplace_back(
        name == "weight" || name == "bias" ? dims.weight
        : name == "mean" || name == "rstd" ? dims.statistics
                                           : dims.full);
  }
}

// The first result is like the input; the others, as many as the op returns, have these dims.
void add_results(const Call& call, Rule& rule, const NormDims& dims, const Dims& others) {
  rule.results.assign(call.schema.returns().size(), Result(others));
  rule.results[0].dims = dims.full;
}

// The kernels assume contiguous inputs. Their caller has made the whole contiguous, but a piece need not be.
void call_in_order(KernelRun& run, at::MemoryFormat format) {
  const auto ndim = Arguments{run}.tensor("input").dim();
  const auto& arguments = run.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (const auto t = Arguments{run}.tensor(arguments[i].name().c_str()); t.defined() && !arguments[i].alias_info()) {
      run.arg(i) = t.contiguous(t.dim() == ndim ? format : at::MemoryFormat::Contiguous);
    }
  }
  run.call_op();
}

// ---- layer norm and rms norm: the last dims share statistics, those before are batch ----

// For the kernels of layer norms: the first dim that is normalized.
struct FirstNormalizedDim {
  int64_t first;
};

NormDims layer_dims(const Call& call, Rule& rule, std::optional<ReduceOp> batch) {
  NormDims out;
  const auto n = call.tensor(call.position("input")).dim();
  const auto axis = n - static_cast<int64_t>(call.ints(call.position("normalized_shape")).size());
  TORCH_CHECK(axis >= 0, call.schema.name(), ": normalized_shape has more dims than the input, which has ", n);
  for (int64_t d = 0; d < n; ++d) {
    out.full.emplace_back(rule.factor(d < axis ? Factor{.reduce = batch} : Factor{.kernel = true}));
    out.statistics.push_back(d < axis ? out.full.back() : Dim(kNone));
    if (d >= axis) {
      out.weight.push_back(out.full.back());
    }
  }
  rule.kernel_data = FirstNormalizedDim{axis};
  add_operands(call, rule, out);
  return out;
}

StatsGroup layer_group(const KernelRun& run, const at::Tensor& x, const KernelRun::OperandInfo& at) {
  const auto axis = kernel_data<FirstNormalizedDim>(run.solution).first;
  const auto shape = guarded(Arguments{run}["normalized_shape"].toSymIntVector());
  const auto sizes = guarded(at.symbols.slice(axis));
  TORCH_CHECK(
      sizes == shape, "Given normalized_shape=", c10::IntArrayRef(shape),
      ", expected input whose last dims have these sizes, but got input of size", at.symbols);
  StatsGroup group{{}, 0, static_cast<double>(c10::multiply_integers(sizes)), run.mesh()};
  for (int64_t d = axis; d < x.dim(); ++d) {
    group.dims.push_back(d);
    group.over |= run.mesh_dims(d); // factor d is dim d's
  }
  return group;
}

std::vector<int64_t> batch_dims(const KernelRun& run) {
  std::vector<int64_t> dims(kernel_data<FirstNormalizedDim>(run.solution).first);
  for (size_t d = 0; d < dims.size(); ++d) {
    dims[d] = static_cast<int64_t>(d);
  }
  return dims;
}

at::Tensor sum_over(const at::Tensor& t, const std::vector<int64_t>& dims) {
  return dims.empty() ? t : t.sum(dims);
}

const at::Tensor& unchanged(const at::Tensor& t) {
  return t;
}

void layer_norm_kernel(KernelRun& run) {
  const Arguments args{run};
  const auto input = args.tensor("input");
  const auto n = normalize(wide(input), layer_group(run, input, run.operands[0]), args["eps"].toDouble());
  const auto type = statistics_type(input, args.tensor("weight"));
  run.returns({scaled(n.value, args, unchanged).to(input.scalar_type()), n.mean.to(type), n.rstd.to(type)});
}

double default_eps(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return std::numeric_limits<c10::Half>::epsilon();
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::epsilon();
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

void rms_norm_kernel(KernelRun& run) {
  const Arguments args{run};
  const auto input = args.tensor("input"), x = wide(input);
  const auto eps = args["eps"].isNone() ? default_eps(input.scalar_type()) : args["eps"].toDouble();
  const auto rstd = layer_group(run, input, run.operands[0]).mean(x.square()).add_(eps).rsqrt_();
  run.returns({scaled(x * rstd, args, unchanged).to(input.scalar_type()), rstd});
}

template <Kernel kernel>
Rule layer_norm(const Call& call) {
  Rule rule;
  const auto dims = layer_dims(call, rule, std::nullopt);
  add_results(call, rule, dims, dims.statistics);
  rule.kernel = kernel;
  return rule;
}

// For layer_norm, and for rms_norm, which subtracts no mean and has no bias.
template <bool centered>
void layer_norm_backward_kernel(KernelRun& run) {
  const Arguments args{run};
  const auto input = args.tensor("input"), weight = args.tensor("weight"), bias = args.tensor("bias");
  const auto rstd = wide(args.tensor("rstd")), grad = wide(args.tensor("grad_out")), x = wide(input);
  const auto value = (centered ? x - wide(args.tensor("mean")) : x) * rstd;
  std::vector<IValue> grads(run.op.schema().returns().size(), at::Tensor());
  if (args.wants(0)) {
    const auto g = weight.defined() ? grad * weight : grad;
    grads[0] = normalize_backward(g, value, rstd, layer_group(run, input, run.operands[1]), centered).to(input.scalar_type());
  }
  if (weight.defined() && args.wants(1)) {
    grads[1] = sum_over(grad * value, batch_dims(run)).to(weight.scalar_type());
  }
  if (bias.defined() && args.wants(2)) {
    grads[2] = sum_over(grad, batch_dims(run)).to(bias.scalar_type());
  }
  run.returns(std::move(grads));
}

template <bool centered>
Rule layer_norm_backward(const Call& call) {
  Rule rule;
  const auto dims = layer_dims(call, rule, ReduceOp::Sum);
  add_results(call, rule, dims, dims.weight);
  rule.linear_in({0});
  rule.kernel = layer_norm_backward_kernel<centered>;
  rule.always_kernel = !centered; // torch has a kernel for rms_norm only on some devices
  return rule;
}

// ---- group norm: [n, c, ...]; a group is c / groups channels and all of space ----

// For the kernels of group norms: the channels of a group.
struct GroupChannels {
  c10::SymInt count;
};

NormDims group_dims(const Call& call, Rule& rule, std::optional<ReduceOp> summed) {
  NormDims out;
  const auto groups = call.integer(call.position("group"));
  const auto& input = call.tensor(call.position("input"));
  const auto n = rule.factor({.reduce = summed}), g = rule.factor();
  out.full = {Dim(n), Dim(g, input.sym_size(1) / groups)};
  out.weight = {out.full[1]};
  out.statistics = {Dim(n), Dim(g)};
  const auto space = fresh_dims(rule, input.dim() - 2, {.kernel = true, .reduce = summed});
  out.full.append(space.begin(), space.end());
  rule.kernel_data = GroupChannels{input.sym_size(1) / groups};
  add_operands(call, rule, out);
  return out;
}

// This rank's piece as [n, groups, channels of a group, space], and the group of values that share statistics.
struct GroupPiece {
  SymSizes sizes;
  StatsGroup group;
  bool by_hand; // the op cannot be used: space is sharded, or the piece is empty

  at::Tensor split(const at::Tensor& t) const {
    return wide(t).reshape_symint(sizes);
  }
  // Reshapes [channels] to broadcast with split()'s result.
  at::Tensor per_channel(const at::Tensor& t) const {
    return t.reshape_symint({1, sizes[1], sizes[2], 1});
  }
};
GroupPiece group_piece(const KernelRun& run, const at::Tensor& x, c10::SymIntArrayRef whole) {
  const auto& channels = kernel_data<GroupChannels>(run.solution).count;
  uint64_t over = 0;
  for (int64_t d = 2; d < x.dim(); ++d) {
    over |= run.mesh_dims(d); // factor d is dim d's
  }
  return {
      {x.sym_size(0), x.sym_size(1) / channels, channels, numel_of(x.sym_sizes().slice(2))},
      {{2, 3}, over, channels * numel_of(whole.slice(2)), run.mesh()},
      over != 0 || is_empty(x)};
}

// The op also takes sizes as arguments; these must be those of this rank's piece.
void call_group_op(KernelRun& run, const GroupPiece& piece) {
  const auto set = [&](const char* name, const c10::SymInt& value) { run.arg(argument(run, name)) = value; };
  set("N", piece.sizes[0]);
  set("C", piece.sizes[1] * piece.sizes[2]);
  set("HxW", piece.sizes[3]);
  set("group", piece.sizes[1].guard_int(__FILE__, __LINE__));
  const auto input = Arguments{run}.tensor("input");
  call_in_order(run, input.is_cpu() ? input.suggest_memory_format() : at::MemoryFormat::Contiguous);
}

void group_norm_kernel(KernelRun& run) {
  const Arguments args{run};
  const auto input = args.tensor("input");
  const auto piece = group_piece(run, input, run.operands[0].symbols);
  if (!piece.by_hand) {
    return call_group_op(run, piece);
  }
  const auto n = normalize(piece.split(input), piece.group, args["eps"].toDouble());
  const auto out = scaled(n.value, args, [&](const at::Tensor& t) { return piece.per_channel(t); });
  const auto type = statistics_type(input, args.tensor("weight"));
  const auto flat = [&](const at::Tensor& t) { return t.to(type).view_symint({piece.sizes[0], piece.sizes[1]}); };
  run.returns({out.to(input.scalar_type()).view_symint(input.sym_sizes()), flat(n.mean), flat(n.rstd)});
}

Rule group_norm(const Call& call) {
  Rule rule;
  const auto dims = group_dims(call, rule, std::nullopt);
  add_results(call, rule, dims, dims.statistics);
  for (size_t i : {1, 2}) {
    rule.results[i].sizes = {call.tensor(call.position("input")).sym_size(0), call.integer(call.position("group"))};
  }
  rule.always(group_norm_kernel);
  return rule;
}

void group_norm_backward_kernel(KernelRun& run) {
  const Arguments args{run};
  const auto input = args.tensor("input"), weight = args.tensor("weight");
  const auto piece = group_piece(run, input, run.operands[1].symbols);
  if (!piece.by_hand) {
    return call_group_op(run, piece);
  }
  const auto spread = [&](const at::Tensor& t) { return wide(t).reshape_symint({piece.sizes[0], piece.sizes[1], 1, 1}); };
  const auto grad = piece.split(args.tensor("grad_out")), rstd = spread(args.tensor("rstd"));
  const auto value = (piece.split(input) - spread(args.tensor("mean"))) * rstd;
  const auto type = weight.defined() ? weight.scalar_type() : input.scalar_type();
  at::Tensor grad_input, grad_weight, grad_bias;
  if (args.wants(0)) {
    const auto g = weight.defined() ? grad * piece.per_channel(weight) : grad;
    grad_input = normalize_backward(g, value, rstd, piece.group, true).to(input.scalar_type()).view_symint(input.sym_sizes());
  }
  if (args.wants(1)) {
    grad_weight = (grad * value).sum(at::IntArrayRef{0, 3}).to(type).view_symint({input.sym_size(1)});
  }
  if (args.wants(2)) {
    grad_bias = grad.sum(at::IntArrayRef{0, 3}).to(type).view_symint({input.sym_size(1)});
  }
  run.returns({grad_input, grad_weight, grad_bias});
}

Rule group_norm_backward(const Call& call) {
  Rule rule;
  const auto dims = group_dims(call, rule, ReduceOp::Sum);
  add_results(call, rule, dims, dims.weight);
  rule.linear_in({0});
  rule.always(group_norm_backward_kernel);
  return rule;
}

// ---- batch norm: [n, c, ...]; statistics of each channel over n and space ----

// In training, n and space share statistics. Otherwise they may be cut freely.
NormDims batch_norm_dims(const Call& call, Rule& rule, bool training, std::optional<ReduceOp> summed) {
  NormDims out;
  const auto& input = call.tensor(call.position("input"));
  const auto shared = training ? Factor{.kernel = true} : Factor{.reduce = summed};
  for (int64_t d = 0; d < input.dim(); ++d) {
    out.full.emplace_back(d == 1 ? rule.factor() : rule.factor(shared));
  }
  out.weight = {input.dim() > 1 ? out.full[1] : Dim(kNone)};
  for (const auto& t : call.tensors) {
    const auto& name = name_of(call, t);
    const bool saved = name.rfind("save_", 0) == 0; // empty where not training
    const bool channels = name == "weight" || name == "bias" || name.rfind("running_", 0) == 0 || (saved && training);
    const bool full = name == "input" || name.rfind("grad_out", 0) == 0;
    rule.operands.emplace_back(full ? out.full : channels ? out.weight : Dims(t.dim(), Dim(kNone)));
  }
  return out;
}

StatsGroup batch_group(const KernelRun& run, const at::Tensor& x, c10::SymIntArrayRef whole) {
  StatsGroup group{{}, 0, c10::SymFloat(numel_of(whole)) / c10::SymFloat(whole[1]), run.mesh()};
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (d != 1) {
      group.dims.push_back(d);
      group.over |= run.mesh_dims(d); // factor d is dim d's
    }
  }
  return group;
}

at::Tensor along_channels(const at::Tensor& t, const at::Tensor& x) {
  SymSizes sizes(x.dim(), 1);
  sizes[1] = t.sym_size(0);
  return t.view_symint(sizes);
}

// All ranks update their running statistics alike, from the same sums.
void update_running(const at::Tensor& running, const at::Tensor& now, double momentum) {
  if (running.defined()) {
    running.mul_(1 - momentum).add_(now.reshape({-1}).to(running.scalar_type()), momentum);
  }
}

bool is_training(const Arguments& args) {
  for (const char* name : {"training", "train", "update"}) {
    if (argument(args.run, name) >= 0) {
      return args[name].toBool();
    }
  }
  return true;
}

// torch's kernels reject empty pieces.
void batch_norm_kernel(KernelRun& run) {
  const Arguments args{run};
  const auto input = args.tensor("input");
  const auto group = batch_group(run, input, run.operands[0].symbols);
  if (!is_empty(input) && !(is_training(args) && group.over)) {
    return call_in_order(run, input.suggest_memory_format());
  }
  if (!is_training(args)) {
    const auto none = at::empty({0}, input.options());
    std::vector<IValue> results(run.op.schema().returns().size(), none);
    results[0] = at::empty_like(input);
    return run.returns(std::move(results));
  }
  const auto x = wide(input);
  const auto n = normalize(x, group, args.either("eps", "epsilon").toDouble());
  const auto out = scaled(n.value, args, [&](const at::Tensor& t) { return along_channels(t, x); });
  const auto momentum = args.either("momentum", "exponential_average_factor").toDouble();
  update_running(args.tensor("running_mean"), n.mean, momentum);
  update_running(args.tensor("running_var"), n.variance * at::Scalar(group.count / (group.count - 1.0)), momentum);
  const auto type = statistics_type(input, args.tensor("weight"));
  std::vector<IValue> results{out.to(input.scalar_type()), n.mean.reshape({-1}).to(type), n.rstd.reshape({-1}).to(type)};
  while (results.size() < run.op.schema().returns().size()) {
    results.emplace_back(at::empty({0}, input.options().dtype(at::kByte)));
  }
  run.returns(std::move(results));
}

Rule batch_norm(const Call& call) {
  Rule rule;
  const auto training_at = argument(call, "training"); // _batch_norm_with_update: always
  const bool training = training_at < 0 || call.flag(training_at);
  const auto dims = batch_norm_dims(call, rule, training, std::nullopt);
  const auto statistics = training ? dims.weight : Dims{Dim(kNone)};
  rule.results = {Result(dims.full), Result(statistics), Result(statistics), Result(Dims{Dim(kNone)})};
  rule.results.resize(call.schema.returns().size());
  for (size_t i = 1; i < rule.results.size(); ++i) {
    rule.results[i].reduce = std::optional<ReduceOp>(); // whole
  }
  if (const auto& x = call.tensors[0]; call.mesh.description().device_type == "cpu" && !x.has_symbols()) {
    rule.results[0].order = channels_last_order(x).value_or(DimOrder()); // torch's meta kernel keeps any order
  }
  rule.always(batch_norm_kernel);
  return rule;
}

void batch_norm_backward_kernel(KernelRun& run) {
  const Arguments args{run};
  const auto input = args.tensor("input"), weight = args.tensor("weight");
  const auto grad = wide(args.either("grad_out", "grad_output").toTensor());
  const auto save = args.either("save_invstd", "save_var").toOptional<at::Tensor>();
  const auto group = batch_group(run, input, run.operands[0].symbols);
  if (!is_empty(input) && !(is_training(args) && group.over)) {
    return call_in_order(run, input.suggest_memory_format());
  }
  if (!is_training(args)) {
    const auto zeros = at::zeros_symint({input.sym_size(1)}, (weight.defined() ? weight : input).options());
    return run.returns({at::empty_like(input), zeros, zeros.clone()});
  }
  const auto x = wide(input);
  const auto rstd = along_channels(wide(*save), x);
  const auto value = (x - along_channels(wide(args.tensor("save_mean")), x)) * rstd;
  auto means = group.mean(at::stack({grad, grad * value}, -1));
  const auto type = weight.defined() ? weight.scalar_type() : input.scalar_type();
  at::Tensor grad_input, grad_weight, grad_bias;
  if (args.wants(0)) {
    grad_input = rstd * (grad - means.select(-1, 0) - value * means.select(-1, 1));
    grad_input = (weight.defined() ? grad_input * along_channels(weight, x) : grad_input).to(input.scalar_type());
  }
  means = means.reshape({-1, 2}) * at::Scalar(group.count);
  if (args.wants(1)) {
    grad_weight = means.select(1, 1).to(type);
  }
  if (args.wants(2)) {
    grad_bias = means.select(1, 0).to(type);
  }
  run.returns({grad_input, grad_weight, grad_bias});
}

Rule batch_norm_backward(const Call& call) {
  Rule rule;
  const auto train_at = argument(call, "train"), update_at = argument(call, "update");
  const bool training = train_at >= 0 ? call.flag(train_at) : update_at < 0 || call.flag(update_at);
  const auto dims = batch_norm_dims(call, rule, training, ReduceOp::Sum);
  add_results(call, rule, dims, dims.weight);
  rule.linear_in({name_of(call, call.tensors[0]) == "input" ? 1 : 0});
  rule.always(batch_norm_backward_kernel);
  return rule;
}

} // namespace

void register_normalization(Registry& r) {
  const Options real{.symbols = true, .takes = kReals};
  const Options weighted{.symbols = true, .takes = kReals, .one_dtype = ~uint64_t{0}, .or_float = true};
  Options running = weighted;
  running.writes = 0b11000; // running_mean, running_var
  r.add("normalization", {"_fused_rms_norm"}, layer_norm<rms_norm_kernel>, {.symbols = true});
  r.add("normalization", {"_fused_rms_norm_backward"}, layer_norm_backward<false>, {.symbols = true});
  r.add(
      "normalization", {"_batch_norm_with_update", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"}, batch_norm,
      weighted);
  r.add("normalization", {"cudnn_batch_norm", "native_batch_norm"}, batch_norm, running);
  r.add(
      "normalization", {"batch_norm_backward", "cudnn_batch_norm_backward", "native_batch_norm_backward"}, batch_norm_backward,
      real);
  r.add("normalization", {"native_group_norm"}, group_norm, weighted);
  r.add("normalization", {"native_group_norm_backward"}, group_norm_backward, real);
  r.add("normalization", {"native_layer_norm"}, layer_norm<layer_norm_kernel>, weighted);
  r.add("normalization", {"native_layer_norm_backward"}, layer_norm_backward<true>, real);
}

} // namespace shardtensor::rules
