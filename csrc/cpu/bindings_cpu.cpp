// The CPU engine's part of flux_inductor._core; flux_inductor/_core.pyi describes it for Python.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>

#include "bindings.h"
#include "core/epoch.h"
#include "core/signals.h"
#include "cpu/segment.h"
#include "cpu/sum.h"
#include "cpu/transfer_thread.h"
#include "cpu/transfers.h"
#include "cpu/workspace.h"

namespace py = pybind11;

namespace flux_inductor {
namespace {

using namespace cpu;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// One of a segment's two buffers as Python sees it: it keeps the memory alive.
struct Buffer {
  std::shared_ptr<Segment> segment;
  int parity;
};

bool ctrl_c_pressed() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// None if all went well, so that the frequent case makes no object.
std::unique_ptr<Outcome> trouble(Outcome outcome) {
  if (outcome.ok()) return nullptr;
  if (outcome.verdict == Verdict::kInterrupted) {
    py::gil_scoped_acquire gil;
    throw py::error_already_set();
  }
  return std::make_unique<Outcome>(std::move(outcome));
}

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kTimeout:
      return "timeout";
    case Verdict::kLost:
      return "lost";
    case Verdict::kFailed:
      return "failed";
    case Verdict::kMismatch:
      return "mismatch";
    case Verdict::kCancelled:
      return "cancelled";
    case Verdict::kInterrupted:
      return "interrupted";
    case Verdict::kArrived:
      return "arrived";
  }
  return "";
}

ElementType element_named(const std::string& dtype) {
  for (ElementType type : kElementTypes) {
    if (name_of(type) == dtype) return type;
  }
  throw std::invalid_argument("no dtype '" + dtype + "'");
}

std::shared_ptr<Transfers> make_transfers(bool push,
                                          const std::vector<std::vector<std::int64_t>>& rows) {
  auto transfers = std::make_shared<Transfers>();
  transfers->push = push;
  transfers->bytes = 0;
  for (const auto& row : rows) {
    if (row.size() != 11) throw std::invalid_argument("a transfer has 11 fields");
    transfers->items.push_back({static_cast<int>(row[0]), static_cast<int>(row[1]),
                                static_cast<int>(row[2]), row[3], row[4], row[5], row[6], row[7],
                                row[8], static_cast<int>(row[9]), static_cast<int>(row[10])});
    transfers->bytes += row[3] * row[4];
  }
  return transfers;
}

std::unique_ptr<Workspace> make_workspace(int rank, std::vector<std::shared_ptr<Segment>> segments,
                                          const std::vector<int>& pids,
                                          std::shared_ptr<TransferThread> thread, Epoch epoch,
                                          std::int64_t inline_bytes) {
  auto peers = std::make_shared<Peers>(rank, std::move(segments), pids);
  return std::make_unique<Workspace>(std::move(peers), std::move(thread), epoch, inline_bytes,
                                     ctrl_c_pressed);
}

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, 1e9) * 1e9));
}

}  // namespace

void bind_cpu(py::module_& module) {
  module.attr("EPOCH_RENEWAL") = kRenewal;
  module.def(
      "sum",
      [](const std::string& dtype, std::uintptr_t result, std::int64_t pitch,
         const std::vector<std::uintptr_t>& partials, std::int64_t count, std::int64_t width,
         float scale) {
        std::vector<const void*> addresses;
        for (const std::uintptr_t address : partials)
          addresses.push_back(reinterpret_cast<const void*>(address));
        cpu::sum(element_named(dtype), reinterpret_cast<void*>(result), pitch, addresses, count,
                 width, scale);
      },
      ReleaseGil());

  py::class_<SignalLayout>(module, "SignalLayout")
      .def(py::init([](int world, int chunks) { return SignalLayout{world, chunks}; }),
           py::arg("world"), py::arg("chunks"))
      .def("arrived", &SignalLayout::arrived, py::arg("peer"), py::arg("chunk"))
      .def("ready", &SignalLayout::ready, py::arg("owner"), py::arg("chunk"))
      .def_property_readonly("count", &SignalLayout::count);

  py::class_<Buffer>(module, "Buffer", py::buffer_protocol()).def_buffer([](Buffer& buffer) {
    const auto size =
        static_cast<py::ssize_t>(buffer.segment->buffer(1) - buffer.segment->buffer(0));
    return py::buffer_info(buffer.segment->buffer(buffer.parity), size);
  });

  py::class_<Segment, std::shared_ptr<Segment>>(module, "Segment")
      .def_static("create", &Segment::create, py::arg("signals"), py::arg("buffer_bytes"),
                  py::arg("epoch"), ReleaseGil())
      .def_static("open", &Segment::open, py::arg("pid"), py::arg("fd"), py::arg("token"))
      .def_property_readonly("fd", &Segment::fd)
      .def_property_readonly("size", &Segment::size)
      .def_property_readonly("token", [](const Segment& segment) { return segment.header().token; })
      .def("announce_failure", &Segment::announce_failure, py::arg("why"))
      .def("buffer", [](std::shared_ptr<Segment> segment, int parity) {
        return Buffer{std::move(segment), parity};
      });

  py::class_<Outcome>(module, "Outcome")
      .def_property_readonly("verdict",
                             [](const Outcome& outcome) { return name_of(outcome.verdict); })
      .def_readonly("peer", &Outcome::peer)
      .def_readonly("expected", &Outcome::expected)
      .def_readonly("seen", &Outcome::seen)
      .def_readonly("text", &Outcome::text);

  py::class_<Transfers, std::shared_ptr<Transfers>>(module, "Transfers")
      .def(py::init(&make_transfers), py::arg("push"), py::arg("rows"));

  py::class_<TransferThread, std::shared_ptr<TransferThread>>(module, "TransferThread")
      .def(py::init<>());

  py::class_<Workspace>(module, "Workspace")
      .def(py::init(&make_workspace), py::arg("rank"), py::arg("segments"), py::arg("pids"),
           py::arg("thread"), py::arg("epoch"), py::arg("inline_bytes"))
      .def_property_readonly("epoch", &Workspace::epoch)
      .def(
          "begin",
          [](Workspace& self, const std::string& descriptor, double limit_s) {
            self.begin(descriptor, nanoseconds(limit_s));
          },
          py::arg("descriptor"), py::arg("limit_s"))
      .def(
          "confirm_all", [](Workspace& self) { return trouble(self.confirm_all()); }, ReleaseGil())
      .def(
          "start",
          [](Workspace& self, std::shared_ptr<Transfers> transfers, std::uintptr_t local,
             bool record) {
            self.start(std::move(transfers), reinterpret_cast<std::uint8_t*>(local), record);
          },
          py::arg("transfers"), py::arg("local"), py::arg("record"), ReleaseGil())
      .def("raise_signal", &Workspace::raise, py::arg("signal"), ReleaseGil())
      .def(
          "wait",
          [](Workspace& self, int signal, int peer) { return trouble(self.wait(signal, peer)); },
          py::arg("signal"), py::arg("peer"), ReleaseGil())
      .def(
          "end", [](Workspace& self) { return trouble(self.end()); }, ReleaseGil())
      .def("fail", &Workspace::fail, py::arg("why"), ReleaseGil())
      .def("leave", &Workspace::leave)
      .def("health",
           [](const Workspace& self) { return trouble(self.peers().health(self.epoch())); })
      .def("moved", [](const Workspace& self) {
        py::list moved;
        for (const Moved& item : self.moved()) {
          moved.append(py::make_tuple(item.owner, item.chunk, item.start_ns, item.stop_ns));
        }
        return moved;
      });
}

}  // namespace flux_inductor
