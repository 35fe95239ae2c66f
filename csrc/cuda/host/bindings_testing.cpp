// Single launches and copies, with every parameter by name, for tests and benchmarks of the
// kernels. Programs make bound calls (bindings_calls.cpp).
#include <pybind11/stl.h>

#include <algorithm>

#include "cuda/all_gather/all_gather_matmul.h"
#include "cuda/host/addresses.h"
#include "cuda/host/bindings_cuda.h"
#include "cuda/reduce_scatter/matmul_reduce_scatter.h"

namespace flux_inductor::cuda {
namespace {

namespace py = pybind11;

// All that a launch needs, in one flat structure.
struct GatherProblem : GatherShape, GatherOperands, GatherSync {};
struct ScatterProblem : ScatterShape, ScatterOperands, ScatterSync {};

template <class T>
void fill(T* (&array)[kMaxRanks], Addresses const& addresses) {
  for (size_t i = 0; i < addresses.size() && i < kMaxRanks; ++i)
    array[i] = pointer<T>(addresses[i]);
}

// A member of a problem as a property: addresses become integers, arrays of them lists.
template <class Problem, class Base, class T>
void property(py::class_<Problem>& c, char const* name, T Base::* member) {
  c.def_readwrite(name, member);
}
template <class Problem, class Base, class T>
void property(py::class_<Problem>& c, char const* name, T* Base::* member) {
  c.def_property(
      name, [member](Problem const& p) { return reinterpret_cast<Address>(p.*member); },
      [member](Problem& p, Address address) { p.*member = pointer<T>(address); });
}
template <class Problem, class Base, class T>
void property(py::class_<Problem>& c, char const* name, T* (Base::*member)[kMaxRanks]) {
  c.def_property(
      name,
      [member](Problem const& p) {
        Addresses addresses;
        for (T* each : p.*member) addresses.push_back(reinterpret_cast<Address>(each));
        return addresses;
      },
      [member](Problem& p, Addresses const& addresses) { fill(p.*member, addresses); });
}

// A problem, all zero when made, with a table of names and members.
template <class Problem>
void properties(py::class_<Problem>&) {}
template <class Problem, class Member, class... Rest>
void properties(py::class_<Problem>& c, char const* name, Member member, Rest... rest) {
  property(c, name, member);
  properties(c, rest...);
}
template <class Problem, class... Table>
void bind_problem(py::module_& m, char const* name, Table... table) {
  py::class_<Problem> c(m, name);
  c.def(py::init([] { return Problem{}; }));
  properties(c, table...);
  c.def_property(
      "wait_limit_ns", [](Problem const& p) { return p.limit.nanoseconds; },
      [](Problem& p, uint64_t limit) { p.limit.nanoseconds = limit; });
  c.def_property(
      "errors", [](Problem const& p) { return reinterpret_cast<Address>(p.limit.record); },
      [](Problem& p, Address record) { p.limit.record = pointer<ErrorRecord>(record); });
}

void bind_problems(py::module_& m) {
  using G = GatherProblem;
  bind_problem<G>(m, "AllGatherMatmul", "world", &G::world, "rank", &G::rank, "strips", &G::strips,
                  "rows", &G::rows, "n", &G::n, "k", &G::k, "own_shard", &G::own_shard,
                  "own_row_stride", &G::own_row_stride, "own_strip_stride", &G::own_strip_stride,
                  "gathered", &G::gathered, "weight", &G::weight, "weight_stride",
                  &G::weight_stride, "bias", &G::bias, "product", &G::product, "kept", &G::kept,
                  "signals", &G::signals, "epoch", &G::epoch, "rows_per_chunk", &G::rows_per_chunk,
                  "last_rows", &G::last_rows, "slices", &G::slices, "group", &G::group, "sms",
                  &G::sms);
  using S = ScatterProblem;
  bind_problem<S>(m, "MatmulReduceScatter", "world", &S::world, "rank", &S::rank, "strips",
                  &S::strips, "rows", &S::rows, "n", &S::n, "k", &S::k, "x", &S::x, "x_row_stride",
                  &S::x_row_stride, "weight", &S::weight, "weight_stride", &S::weight_stride,
                  "bias", &S::bias, "addend", &S::addend, "scale", &S::scale, "parts", &S::parts,
                  "partials", &S::partials, "delivered", &S::delivered, "counters", &S::counters,
                  "arrived", &S::arrived, "epoch", &S::epoch, "claims", &S::claims, "group",
                  &S::group, "chunk_columns", &S::chunk_columns, "sms", &S::sms);
}

BoundScatter bound(MatmulReduceScatterKernel const& kernel, ScatterProblem const& p) {
  bool stores = p.delivered[(p.rank + 1) % p.world] != nullptr;
  return {p, kernel.tile, stores, kernel.prepare()};
}

}  // namespace

void bind_testing(py::module_& m) {
  bind_problems(m);
  m.def("launch", [](AllGatherMatmulKernel const& kernel, GatherProblem p, Address stream) {
    p.limit.op = Op::all_gather_matmul;
    BoundGather bound(p, kernel.tile);
    kernel.launch({bound, p, p}, stream_at(stream));
  });
  m.def("launch", [](MatmulReduceScatterKernel const& kernel, ScatterProblem p, Address stream) {
    p.limit.op = Op::matmul_reduce_scatter;
    BoundScatter made = bound(kernel, p);
    kernel.launch({made, p, p}, stream_at(stream));
  });
  m.def("signals_per_shard",
        [](GatherProblem const& p) { return p.transfers().chunks_at(p.rank).signals_per_shard(); });
  m.def("chunks_per_part", [](MatmulReduceScatterKernel const& kernel, ScatterProblem const& p) {
    return bound(kernel, p).chunks.per_part();
  });
  m.def("push_shard", [](GatherProblem const& p, Addresses const& gathered,
                         Addresses const& signals, Address stream) {
    Push push{};
    std::fill_n(push.from, p.world, p.own_shard);
    fill(push.to, gathered);
    fill(push.signals, signals);
    push.epoch = p.epoch;
    push_copies(shard_copies(p), push, stream_at(stream));
  });
  m.def("push_partials", [](MatmulReduceScatterKernel const& kernel, ScatterProblem const& p,
                            Addresses const& partials, Addresses const& arrived, Address stream) {
    Push push{};
    std::copy_n(p.parts, p.world, push.from);
    fill(push.to, partials);
    fill(push.signals, arrived);
    push.epoch = p.epoch;
    push.counters = p.counters;
    push_copies(partial_copies(bound(kernel, p), kernel.result), push, stream_at(stream));
  });
}

}  // namespace flux_inductor::cuda
