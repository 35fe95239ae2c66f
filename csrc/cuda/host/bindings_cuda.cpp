// Python's view of the CUDA kernels: addresses, streams and sizes are integers. No check is made
// here; the runtime passes what it has checked.
#include <pybind11/stl.h>

#include "bindings.h"
#include "cuda/all_gather/all_gather_matmul.h"
#include "cuda/host/bindings_workspace.h"
#include "cuda/reduce_scatter/matmul_reduce_scatter.h"
#include "cuda/transport/copy_engine.h"

namespace flux_inductor::cuda {
namespace {

namespace py = pybind11;
using Address = std::uintptr_t;
using Addresses = std::vector<Address>;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}
cudaStream_t stream_of(Address stream) { return pointer<CUstream_st>(stream); }

template <class T>
void fill(T* (&array)[kMaxRanks], Addresses const& addresses) {
  for (size_t i = 0; i < addresses.size() && i < kMaxRanks; ++i)
    array[i] = pointer<T>(addresses[i]);
}

// A member of a problem as a property: addresses become integers, arrays of them lists.
template <class Class, class Problem, class T>
void property(Class& c, char const* name, T Problem::* member) {
  c.def_readwrite(name, member);
}
template <class Class, class Problem, class T>
void property(Class& c, char const* name, T* Problem::* member) {
  c.def_property(
      name, [member](Problem const& p) { return reinterpret_cast<Address>(p.*member); },
      [member](Problem& p, Address address) { p.*member = pointer<T>(address); });
}
template <class Class, class Problem, class T>
void property(Class& c, char const* name, T* (Problem::*member)[kMaxRanks]) {
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
template <class Class>
void properties(Class&) {}
template <class Class, class Member, class... Rest>
void properties(Class& c, char const* name, Member member, Rest... rest) {
  property(c, name, member);
  properties(c, rest...);
}
template <class Problem, class... Table>
void bind_problem(py::module_& m, char const* name, Table... table) {
  py::class_<Problem> c(m, name);
  c.def(py::init([] { return Problem{}; }));
  properties(c, table...);
}

void bind_problems(py::module_& m) {
  using G = AllGatherMatmul;
  bind_problem<G>(m, "AllGatherMatmul", "world", &G::world, "rank", &G::rank, "strips", &G::strips,
                  "rows", &G::rows, "n", &G::n, "k", &G::k, "own_shard", &G::own_shard,
                  "own_row_stride", &G::own_row_stride, "own_strip_stride", &G::own_strip_stride,
                  "gathered", &G::gathered, "weight", &G::weight, "weight_stride",
                  &G::weight_stride, "bias", &G::bias, "product", &G::product, "kept", &G::kept,
                  "signals", &G::signals, "epoch", &G::epoch, "rows_per_chunk", &G::rows_per_chunk,
                  "last_rows", &G::last_rows, "slices", &G::slices, "group", &G::group, "sms",
                  &G::sms, "wait_limit_ns", &G::wait_limit_ns, "errors", &G::errors);
  using S = MatmulReduceScatter;
  bind_problem<S>(m, "MatmulReduceScatter", "world", &S::world, "rank", &S::rank, "strips",
                  &S::strips, "rows", &S::rows, "n", &S::n, "k", &S::k, "x", &S::x, "x_row_stride",
                  &S::x_row_stride, "weight", &S::weight, "weight_stride", &S::weight_stride,
                  "bias", &S::bias, "addend", &S::addend, "scale", &S::scale, "parts", &S::parts,
                  "partials", &S::partials, "delivered", &S::delivered, "counters", &S::counters,
                  "arrived", &S::arrived, "epoch", &S::epoch, "claims", &S::claims, "group",
                  &S::group, "chunk_columns", &S::chunk_columns, "sms", &S::sms, "wait_limit_ns",
                  &S::wait_limit_ns, "errors", &S::errors);
}

char const* name_of(ElementType type) {
  if (type == ElementType::fp32) return "fp32";
  return type == ElementType::bf16 ? "bf16" : "fp16";
}

template <class Problem>
void bind_kernels(py::module_& m, char const* class_name, char const* list_name,
                  std::vector<KernelEntry<Problem>> const& (*kernels)()) {
  using Entry = KernelEntry<Problem>;
  py::class_<Entry>(m, class_name)
      .def_property_readonly("tile", [](Entry const& e) { return to_string(e.tile); })
      .def_property_readonly("element", [](Entry const& e) { return name_of(e.element); })
      .def_property_readonly("result", [](Entry const& e) { return name_of(e.result); })
      .def_property_readonly(
          "layout",
          [](Entry const& e) { return e.layout == WeightLayout::k_major ? "k_major" : "n_major"; })
      .def_readonly("shared_memory", &Entry::shared_memory)
      .def_readonly("stages", &Entry::stages)
      .def("prepare", [](Entry const& e) { return e.prepare(); })
      .def("launch", [](Entry const& e, Problem const& p, Address stream) {
        e.launch(p, stream_of(stream));
      });
  m.def(list_name, kernels, py::return_value_policy::reference);
}

void bind_module(py::module_& m) {
  bind_problems(m);
  bind_kernels(m, "AllGatherMatmulKernel", "all_gather_matmul_kernels", &all_gather_matmul_kernels);
  bind_kernels(m, "MatmulReduceScatterKernel", "matmul_reduce_scatter_kernels",
               &matmul_reduce_scatter_kernels);

  m.def("gather_signals_per_shard",
        [](AllGatherMatmul const& p) { return p.chunks_at(p.rank).signals_per_shard(); });
  m.def("scatter_chunks_per_part",
        [](MatmulReduceScatterKernel const& kernel, MatmulReduceScatter const& p) {
          ScatterSchedule schedule = p.schedule(kernel.tile);
          return schedule.chunks(schedule.parts()).per_part();
        });
  m.def("push_shard", [](AllGatherMatmul const& p, Addresses const& gathered,
                         Addresses const& signals, Address stream) {
    ShardPush push{};
    fill(push.gathered, gathered);
    fill(push.signals, signals);
    push_shard(p, push, stream_of(stream));
  });
  m.def("push_partials", [](MatmulReduceScatterKernel const& kernel, MatmulReduceScatter const& p,
                            Addresses const& partials, Addresses const& arrived, Address stream) {
    PartialsPush push{};
    fill(push.partials, partials);
    fill(push.arrived, arrived);
    push_partials(p, kernel, push, stream_of(stream));
  });
}

}  // namespace
}  // namespace flux_inductor::cuda

void flux_inductor::bind_cuda(pybind11::module_& module) {
  auto submodule = module.def_submodule("cuda", "The CUDA kernels; addresses are integers.");
  cuda::bind_module(submodule);
  cuda::bind_workspace(submodule);
}
