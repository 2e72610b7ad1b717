// Ops that draw random numbers. Each draws one key from torch's generator (draws/keys.h) and fills its piece by global
// index (kernels/random.h): the layout is kept, and the global values do not depend on it.
#include "rules/registry.h"

#include "comm/tensor_kind.h"
#include "draws/fill.h"
#include "draws/graph.h"
#include "draws/keys.h"
#include "kernels/random.h"
#include "layout/symbolic.h"
#include "rules/solution.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <limits>

namespace shardtensor::rules {

namespace {

using kernels::Distribution;
using Family = Distribution::Family;

// ---- reading a call ----

const c10::IValue* given(const KernelRun& run, const char* name) {
  const auto i = run.op.schema().argumentIndexWithName(name);
  return i && !run.arg(*i).isNone() ? &run.arg(*i) : nullptr;
}

double number(const KernelRun& run, const char* name) {
  const auto* v = given(run, name);
  TORCH_INTERNAL_ASSERT(v, run.op.schema().name(), " has no argument ", name);
  return v->toScalar().toDouble();
}

// A tensor without values draws no key, as in torch; a tensor of a graph draws one when the graph runs.
draws::RandomKey next_key(const KernelRun& run, const at::Tensor& local) {
  const auto* generator = given(run, "generator");
  if (is_traced(local)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !generator, run.op.schema().name(),
        ": argument 'generator' cannot be traced into a graph (torch.compile, export); omit it to use the default generator, "
        "or draw outside of the compiled function");
    return {0, draws::next_key_in_graph(local, run.mesh())};
  }
  if (!is_wrapper(local) && !has_values(local)) {
    return {};
  }
  return {draws::next_key(run.mesh(), generator ? std::optional(generator->toGenerator()) : std::nullopt), {}};
}

// Raises if `holds` is false; in a graph, when it runs.
void check_values(const at::Tensor& holds, const char* message) {
  if (is_traced(holds)) {
    at::_assert_async(holds.all(), message);
  } else {
    TORCH_CHECK(holds.all().item<bool>(), message);
  }
}

// Fills `local`, a piece like operand i's.
void fill_like(const KernelRun& run, at::Tensor& local, const Distribution& d, size_t i = 0) {
  const auto& like = run.operands[i];
  draws::fill(local, next_key(run, local), *like.layout, like.symbols, d);
}

// A new local tensor like argument 0, as empty_like makes it.
at::Tensor fresh(const KernelRun& run) {
  const auto option = [&](const char* name) {
    const auto* v = given(run, name);
    return v ? *v : c10::IValue();
  };
  return at::empty_like(
      run.arg(0).toTensor(), option("dtype").toOptional<at::ScalarType>(), option("layout").toOptional<at::Layout>(),
      option("device").toOptional<at::Device>(), option("pin_memory").toOptional<bool>(),
      option("memory_format").toOptional<at::MemoryFormat>());
}

// ---- distributions, with torch's checks ----

using ReadDistribution = Distribution (*)(const KernelRun&, at::ScalarType);

Distribution uniform(const KernelRun& run, at::ScalarType) {
  const double from = number(run, "from"), to = number(run, "to");
  TORCH_CHECK(from <= to, "uniform_ expects to return a [from, to) range, but found from=", from, " > to=", to);
  return {Family::Uniform, from, to};
}

Distribution unit_uniform(const KernelRun&, at::ScalarType) {
  return {Family::Uniform, 0, 1};
}

Distribution normal(const KernelRun& run, at::ScalarType) {
  const double std = number(run, "std");
  TORCH_CHECK(std >= 0, "normal expects std >= 0.0, but found std ", std);
  return {Family::Normal, number(run, "mean"), std};
}

Distribution unit_normal(const KernelRun&, at::ScalarType) {
  return {Family::Normal, 0, 1};
}

Distribution log_normal(const KernelRun& run, at::ScalarType) {
  const double std = number(run, "std");
  TORCH_CHECK(std > 0, "log_normal_ expects std > 0.0, but found std=", std);
  return {Family::LogNormal, number(run, "mean"), std};
}

Distribution cauchy(const KernelRun& run, at::ScalarType) {
  const double sigma = number(run, "sigma");
  TORCH_CHECK(sigma > 0, "cauchy_ expects sigma > 0.0, but found sigma=", sigma);
  return {Family::Cauchy, number(run, "median"), sigma};
}

Distribution exponential(const KernelRun& run, at::ScalarType) {
  const double rate = number(run, "lambd");
  TORCH_CHECK(rate > 0, "exponential_ expects lambda > 0.0, but found lambda=", rate);
  return {Family::Exponential, rate};
}

Distribution geometric(const KernelRun& run, at::ScalarType) {
  const double p = number(run, "p");
  TORCH_CHECK(p > 0 && p < 1, "geometric_ expects p to be in (0, 1), but got p=", p);
  return {Family::Geometric, p};
}

Distribution bernoulli_of(double p) {
  TORCH_CHECK(p >= 0 && p <= 1, "bernoulli_ expects p to be in [0, 1], but got p=", p);
  return {Family::Bernoulli, p};
}

Distribution bernoulli(const KernelRun& run, at::ScalarType) {
  return bernoulli_of(number(run, "p"));
}

// The largest value of random_(): the type's maximum; for a floating type, the end of the range in which it holds every
// integer.
uint64_t largest(at::ScalarType dtype) {
  if (c10::isIntegralType(dtype, true)) {
    const auto bits = 8 * c10::elementSize(dtype);
    const bool is_signed = c10::isSignedType(dtype);
    return dtype == at::kBool ? 1 : std::numeric_limits<uint64_t>::max() >> (64 - bits + is_signed);
  }
  return uint64_t{1} << (dtype == at::kDouble ? 53 : dtype == at::kFloat ? 24 : dtype == at::kHalf ? 11 : 8);
}

// low, ..., high
Distribution integers(int64_t low, uint64_t high) {
  const auto range = high - static_cast<uint64_t>(low) + 1; // 2^64 wraps to 0, which stands for it
  return {.kind = Family::Integer, .low = low, .range = range};
}

Distribution integers_below(int64_t from, int64_t to, at::ScalarType dtype) {
  TORCH_CHECK(from < to, "random_ expects 'from' to be less than 'to', but got from=", from, " >= to=", to);
  if (c10::isIntegralType(dtype, true)) {
    const auto fits = [&](int64_t x) {
      return x < 0 ? c10::isSignedType(dtype) && x >= -1 - static_cast<int64_t>(largest(dtype))
                   : static_cast<uint64_t>(x) <= largest(dtype);
    };
    TORCH_CHECK(fits(from), "from is out of bounds for ", dtype);
    TORCH_CHECK(fits(to - 1), "to - 1 is out of bounds for ", dtype);
  }
  return integers(from, static_cast<uint64_t>(to) - 1);
}

Distribution random(const KernelRun& run, at::ScalarType dtype) {
  const auto* from = given(run, "from");
  const auto* to = given(run, "to");
  const auto low = from ? from->toInt() : 0;
  return to ? integers_below(low, to->toInt(), dtype) : integers(low, largest(dtype));
}

int64_t value_of(const at::Tensor& high) {
  need_values(high, "randint_like's `high` as a tensor");
  return high.item<int64_t>();
}

Distribution randint(const KernelRun& run, at::ScalarType dtype) {
  const auto* low = given(run, "low");
  const auto* high = given(run, "high");
  return integers_below(low ? low->toInt() : 0, high->isTensor() ? value_of(high->toTensor()) : high->toInt(), dtype);
}

// ---- kernels ----

template <ReadDistribution read>
void fill_self(KernelRun& run) {
  auto self = run.arg(0).toTensor();
  fill_like(run, self, read(run, self.scalar_type()));
  run.returns({std::move(self)});
}

template <ReadDistribution read>
void fill_fresh(KernelRun& run) {
  auto out = fresh(run);
  fill_like(run, out, read(run, out.scalar_type()));
  run.returns({std::move(out)});
}

// Whether a uniform number of the same index is below `p`, with the shape of `of`.
at::Tensor below(const KernelRun& run, const at::Tensor& p, const at::Tensor& of) {
  auto u = at::empty_symint(of.sym_sizes(), of.options().dtype(at::kDouble));
  fill_like(run, u, {Family::Uniform, 0, 1});
  check_values(at::logical_and(p >= 0, p <= 1), "Expected p_in >= 0 && p_in <= 1 to be true");
  return u < p;
}

void bernoulli_tensor_(KernelRun& run) {
  auto self = run.arg(0).toTensor();
  self.copy_(below(run, run.arg(1).toTensor(), self));
  run.returns({std::move(self)});
}

void bernoulli_tensor(KernelRun& run) {
  const auto self = run.arg(0).toTensor();
  run.returns({at::empty_like(self).copy_(below(run, run.arg(1).toTensor(), self))});
}

void bernoulli_of_self(KernelRun& run) {
  const auto p = run.arg(0).toTensor();
  run.returns({at::empty_like(p).copy_(below(run, p, p))});
}

// normal(mean, std) where one or both are tensors; the result has the mean's dtype.
void normal_of_tensors(KernelRun& run) {
  const auto mean = run.arg(0), std = run.arg(1);
  auto sizes = run.operands[0].symbols.vec();
  if (run.operands.size() > 1) {
    sizes = at::infer_size_symint(sizes, run.operands[1].symbols);
  }
  const auto& layout = *run.solution.results[0].layout;
  const auto& like = (mean.isTensor() ? mean : std).toTensor();
  auto out = at::empty_symint(sym_local_sizes(layout, sizes), like.options());
  draws::fill(out, next_key(run, out), layout, sizes, {Family::Normal, 0, 1});
  if (std.isTensor()) {
    const auto s = std.toTensor();
    check_values(s >= 0, "normal expects all elements of std >= 0.0");
    out.mul_(s);
  } else {
    TORCH_CHECK(std.toDouble() >= 0, "normal expects std >= 0.0, but found std ", std.toDouble());
    out.mul_(std.toDouble());
  }
  if (mean.isTensor()) {
    out.add_(mean.toTensor());
  } else {
    out.add_(mean.toDouble());
  }
  run.returns({std::move(out)});
}

void native_dropout(KernelRun& run) {
  const auto x = run.arg(0).toTensor();
  const auto p = run.arg(1).toDouble();
  const bool train = run.arg(2).isNone() || run.arg(2).toBool();
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (!train) {
    run.returns({x.clone(), at::ones_like(x, x.options().dtype(at::kBool))});
    return;
  }
  auto mask = at::empty_like(x, x.options().dtype(at::kBool));
  fill_like(run, mask, {Family::Bernoulli, 1 - p});
  run.returns({at::mul(x, mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask});
}

// The slopes drawn are written to `noise` for the backward.
void rrelu_with_noise(KernelRun& run) {
  auto x = run.arg(0).toTensor();
  auto noise = run.arg(1).toTensor();
  const double lower = number(run, "lower"), upper = number(run, "upper");
  TORCH_CHECK(lower <= upper, "Lower bound should be less than or equal to the upper bound");
  const bool in_place = run.op.schema().arguments()[0].alias_info() != nullptr;
  at::Tensor slope;
  if (given(run, "training")->toBool()) {
    slope = at::empty_like(x);
    fill_like(run, slope, {Family::Uniform, lower, upper});
    slope.masked_fill_(x > 0, 1);
    noise.copy_(slope);
  } else {
    slope = at::where(x > 0, at::ones({}, x.options()), at::full({}, (lower + upper) / 2, x.options()));
  }
  run.returns({in_place ? x.mul_(slope) : at::mul(x, slope)});
}

// Draws each row independently by an exponential race: the item with the largest p / exponential wins.
void multinomial_race(KernelRun& run) {
  const auto p = run.arg(0).toTensor();
  const auto n = run.arg(1).toInt();
  auto q = at::empty_like(p);
  fill_like(run, q, {Family::Exponential, 1}); // all ranks draw a key here, before checks that may raise on one
  if (!is_empty(p)) {
    const auto total = p.sum(-1);
    check_values(
        at::logical_and(total > 0, at::isfinite(total)).all().logical_and(p.min().ge(0)),
        "multinomial: probability tensor contains either `inf`, `nan` or element < 0, or a row that sums to 0");
  }
  at::div_out(q, p, q);
  run.returns({n == 1 ? at::argmax(q, -1, true) : std::get<1>(at::topk(q, n, -1))});
}

// Every rank draws everything, from a generator with the same seed.
void same_everywhere(KernelRun& run) {
  const auto self = run.arg(0).toTensor();
  need_values(self, "a draw by torch's own kernel");
  auto generator = at::globalContext().defaultGenerator(self.device()).clone();
  generator.set_current_seed(next_key(run, self).bits);
  run.arg(*run.op.schema().argumentIndexWithName("generator")) = std::move(generator);
  run.call_op();
}

// ---- rules ----

template <Kernel kernel>
constexpr RuleFn elementwise = always<broadcast, kernel>;
template <Kernel kernel>
constexpr RuleFn whole = always<replicate, kernel>;

// Only the shape and the shards of argument 0 are read.
template <Kernel kernel>
Rule like(const Call& call) {
  auto rule = elementwise<kernel>(call);
  rule.operands[0].free = true;
  return rule;
}

Rule multinomial(const Call& call) {
  const auto& p = call.tensors[0];
  const auto n = call.integer(1);
  TORCH_CHECK(c10::isFloatingType(p.dtype), "multinomial only supports floating-point dtypes for input, got: ", p.dtype);
  TORCH_CHECK(n > 0, "cannot sample n_sample <= 0 samples");
  TORCH_CHECK(p.dim() == 1 || p.dim() == 2, "prob_dist must be 1 or 2 dim");
  if (call.flag(2) && n > 1) {
    return whole<same_everywhere>(call);
  }
  TORCH_CHECK(n <= p.sizes().back(), "cannot sample n_sample > prob_dist.size(-1) samples without replacement");
  Rule rule;
  Dims dims, out;
  if (p.dim() == 2) {
    dims.emplace_back(rule.factor());
    out = dims;
  }
  dims.emplace_back(rule.whole());
  out.emplace_back(kNone);
  rule.operands.emplace_back(dims);
  rule.results.emplace_back(out);
  rule.always(multinomial_race);
  return rule;
}

} // namespace

void register_random(Registry& r) {
  const Options any{.symbols = true}, with_zeros{.autograd = formulas::with_zeros, .symbols = true},
      real{.symbols = true, .takes = kReals}, numbers{.symbols = true, .takes = kReals | kComplex};
  const Options ordinary{.symbols = true, .takes = kIntegers | kReals};
  r.add("random", {"_dirichlet_grad", "_standard_gamma_grad"}, broadcast);
  r.add("random", {"_sample_dirichlet", "_standard_gamma", "binomial"}, whole<same_everywhere>, {.whole = true});
  r.add("random", {"bernoulli"}, elementwise<bernoulli_of_self>, real);
  r.add("random", {"bernoulli.Tensor"}, elementwise<bernoulli_tensor>, with_zeros);
  r.add("random", {"bernoulli.p"}, like<fill_fresh<bernoulli>>, with_zeros);
  r.add("random", {"bernoulli_.Tensor"}, elementwise<bernoulli_tensor_>, any);
  r.add("random", {"bernoulli_.float"}, elementwise<fill_self<bernoulli>>, any);
  r.add("random", {"cauchy"}, like<fill_fresh<cauchy>>, real);
  r.add("random", {"cauchy_"}, elementwise<fill_self<cauchy>>, real);
  r.add("random", {"exponential"}, like<fill_fresh<exponential>>, real);
  r.add("random", {"exponential_"}, elementwise<fill_self<exponential>>, real);
  r.add("random", {"geometric"}, like<fill_fresh<geometric>>, ordinary);
  r.add("random", {"geometric_"}, elementwise<fill_self<geometric>>, ordinary);
  r.add("random", {"log_normal"}, like<fill_fresh<log_normal>>, real);
  r.add("random", {"log_normal_"}, elementwise<fill_self<log_normal>>, real);
  r.add("random", {"multinomial"}, multinomial);
  r.add("random", {"native_dropout"}, elementwise<native_dropout>, any);
  r.add(
      "random", {"normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor"}, elementwise<normal_of_tensors>,
      {.autograd = formulas::with_zeros, .symbols = true, .takes = numbers.takes});
  r.add("random", {"normal_"}, elementwise<fill_self<normal>>, numbers);
  r.add("random", {"normal_functional"}, like<fill_fresh<normal>>, numbers);
  r.add("random", {"poisson"}, whole<same_everywhere>, {.autograd = formulas::with_zeros, .whole = true});
  r.add("random", {"rand_like", "rand_like.generator"}, like<fill_fresh<unit_uniform>>, any);
  r.add(
      "random",
      {"randint_like", "randint_like.Tensor", "randint_like.Tensor_generator", "randint_like.generator", "randint_like.low_dtype",
       "randint_like.low_generator_dtype"},
      like<fill_fresh<randint>>);
  r.add("random", {"randn_like", "randn_like.generator"}, like<fill_fresh<unit_normal>>, any);
  r.add("random", {"random", "random.from", "random.to"}, like<fill_fresh<random>>);
  r.add("random", {"random_", "random_.from", "random_.to"}, elementwise<fill_self<random>>);
  const Options noisy{.symbols = true, .takes = kReals, .unwritten = true}; // the noise, where it is not training
  r.add("random", {"rrelu_with_noise", "rrelu_with_noise_"}, elementwise<rrelu_with_noise>, noisy);
  r.add("random", {"rrelu_with_noise_backward"}, linear_in_first<broadcast>);
  r.add("random", {"uniform"}, like<fill_fresh<uniform>>, real);
  r.add("random", {"uniform_"}, elementwise<fill_self<uniform>>, real);
}

} // namespace shardtensor::rules
