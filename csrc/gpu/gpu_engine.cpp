#include "gpu/gpu_engine.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "common/error.h"
#include "common/steady_clock.h"

namespace gemini {
namespace {

GpuAddress number(const char* address) { return reinterpret_cast<GpuAddress>(address); }

size_t index(Link link) { return link == Link::kDeviceToHost || link == Link::kDiskWrite ? 1 : 0; }

}  // namespace

GpuEngine::GpuEngine(std::shared_ptr<GpuLanes> lanes, AsyncFile* file) : lanes_(std::move(lanes)) {
  if (file == nullptr) return;
  const auto report = [this](Link link) {
    return [this, link](const StagedJob& job, TransferResult result) {
      const Lock lock(staged_.mutex);
      LinkStats& stats = staged_.stats[index(link)];
      stats.bytes += result.ok ? job.nbytes : 0;
      stats.seconds += result.end_s - result.begin_s;
      ++stats.transfers;
      staged_.results.push_back(std::move(result));
      --staged_.num_in_flight;
      staged_.progress.notify_all();
    };
  };
  reads_ = std::make_unique<StagedLink>(lanes_, *file, Link::kDiskRead, report(Link::kDiskRead));
  writes_ = std::make_unique<StagedLink>(lanes_, *file, Link::kDiskWrite, report(Link::kDiskWrite));
}

GpuEngine::~GpuEngine() {
  if (!process_.is_owner()) {
    (void)reads_.release();  // their threads do not exist in the child
    (void)writes_.release();
    return;
  }
  reads_.reset();
  writes_.reset();
  try {
    for (const Copy& copy : copies_) lanes_->await(copy.end);
  } catch (const Error&) {
    // A GPU that has failed copies nothing any longer.
  }
}

GpuEngine::Ticket GpuEngine::next_ticket(int64_t nbytes, int64_t room_bytes) {
  process_.require("this GpuEngine");
  if (closed_) throw StateError("this GpuEngine is closed");
  if (nbytes < 0 || nbytes > room_bytes) {
    throw StateError("cannot transfer " + std::to_string(nbytes) + " bytes: there is room for " +
                     std::to_string(room_bytes));
  }
  return next_ticket_++;
}

GpuEngine::Ticket GpuEngine::copy(GpuWindow& dst, HostPlace& src, int64_t nbytes) {
  return start_copy(Lane::kHostToDevice, dst.address(), number(src.address()),
                    std::min({nbytes, dst.span_bytes(), src.span_bytes()}), dst.uses(), src.uses());
}

GpuEngine::Ticket GpuEngine::copy(HostPlace& dst, GpuWindow& src, int64_t nbytes) {
  // Operators write to a window without leaving a mark.
  src.uses().note(Lane::kCompute, lanes_->mark(Lane::kCompute));
  return start_copy(Lane::kDeviceToHost, number(dst.address()), src.address(),
                    std::min({nbytes, dst.span_bytes(), src.span_bytes()}), dst.uses(), src.uses());
}

GpuEngine::Ticket GpuEngine::start_copy(Lane lane, GpuAddress dst, GpuAddress src, int64_t nbytes,
                                        Uses& dst_uses, Uses& src_uses) {
  const Ticket ticket = next_ticket(nbytes, nbytes);
  lanes_->wait(lane, dst_uses);
  lanes_->wait(lane, src_uses);
  Mark begin = lanes_->mark(lane);
  lanes_->driver().copy(dst, src, nbytes, lanes_->stream(lane));
  const Mark end = lanes_->mark(lane);
  dst_uses.note(lane, end);
  src_uses.note(lane, end);
  const Link link = lane == Lane::kHostToDevice ? Link::kHostToDevice : Link::kDeviceToHost;
  copies_.push_back({ticket, link, nbytes, std::move(begin), end, now_seconds(), false});
  ++num_unreported_copies_;
  return ticket;
}

GpuEngine::Ticket GpuEngine::read(GpuWindow& dst, int64_t nbytes, int64_t offset) {
  const Ticket ticket = next_ticket(nbytes, dst.span_bytes());
  return start_staged(reads_, {ticket, dst.address(), nullptr, nbytes, offset, dst.uses()});
}

GpuEngine::Ticket GpuEngine::write(GpuWindow& src, int64_t nbytes, int64_t offset) {
  const Ticket ticket = next_ticket(nbytes, src.span_bytes());
  src.uses().note(Lane::kCompute, lanes_->mark(Lane::kCompute));
  return start_staged(writes_, {ticket, src.address(), nullptr, nbytes, offset, src.uses()});
}

GpuEngine::Ticket GpuEngine::write(HostPlace& src, int64_t nbytes, int64_t offset) {
  const Ticket ticket = next_ticket(nbytes, src.span_bytes());
  return start_staged(writes_, {ticket, 0, src.address(), nbytes, offset, src.uses()});
}

GpuEngine::Ticket GpuEngine::start_staged(std::unique_ptr<StagedLink>& link, StagedJob job) {
  if (!link) throw StateError("this GpuEngine was made without a file: there is no DISK tier");
  const Ticket ticket = job.ticket;
  {
    const Lock lock(staged_.mutex);
    ++staged_.num_in_flight;
  }
  link->submit(std::move(job));
  return ticket;
}

// Reports, counts and forgets the copies that have ended. Copies of a lane end in order.
void GpuEngine::report_ended() {
  measure_stalls();
  std::array<bool, 2> may_have_ended = {true, true};
  for (auto copy = copies_.begin(); copy != copies_.end();) {
    bool& may_have = may_have_ended[index(copy->link)];
    may_have = may_have && lanes_->passed(copy->end);
    if (!may_have) {
      ++copy;
      continue;
    }
    count(*copy);
    copy = copies_.erase(copy);
  }
}

void GpuEngine::count(const Copy& copy) {
  const double seconds = lanes_->seconds(copy.begin, copy.end);
  LinkStats& stats = copy_stats_[index(copy.link)];
  stats.bytes += copy.nbytes;
  stats.seconds += seconds;
  ++stats.transfers;
  if (copy.reported) return;
  const double end_s = now_seconds();
  results_.push_back(
      {copy.ticket, true, 0, "", 0, "", std::max(copy.submitted_s, end_s - seconds), end_s});
  --num_unreported_copies_;
}

std::vector<TransferResult> GpuEngine::poll() {
  process_.require("this GpuEngine");
  report_ended();
  std::vector<TransferResult> results = std::exchange(results_, {});
  const Lock lock(staged_.mutex);
  std::move(staged_.results.begin(), staged_.results.end(), std::back_inserter(results));
  staged_.results.clear();
  return results;
}

// The copy that operators are made to wait for first: one that they need, before one that makes
// room.
GpuEngine::Copy* GpuEngine::next_unreported() {
  for (const Link link : {Link::kHostToDevice, Link::kDeviceToHost}) {
    for (Copy& copy : copies_) {
      if (copy.link == link && !copy.reported) return &copy;
    }
  }
  return nullptr;
}

bool GpuEngine::wait_any(double timeout_s) {
  process_.require("this GpuEngine");
  report_ended();
  if (!results_.empty()) return true;
  if (Copy* const next = next_unreported()) {
    // Also for a copy to the host: operators may write to its source once it is reported.
    Uses copied;
    copied.note(next->link == Link::kHostToDevice ? Lane::kHostToDevice : Lane::kDeviceToHost,
                next->end);
    Mark begin = lanes_->mark(Lane::kCompute);
    lanes_->wait(Lane::kCompute, copied);
    stalls_.push_back({std::move(begin), lanes_->mark(Lane::kCompute)});
    next->reported = true;
    --num_unreported_copies_;
    results_.push_back({next->ticket, true, 0, "", 0, "", next->submitted_s, now_seconds()});
    return true;
  }
  const Lock lock(staged_.mutex);
  const auto end = Condition::end_of(timeout_s);
  while (staged_.results.empty() && staged_.num_in_flight > 0) {
    if (!staged_.progress.wait_until(staged_.mutex, end)) break;
  }
  return !staged_.results.empty();
}

void GpuEngine::drain() {
  process_.require("this GpuEngine");
  for (const Copy& copy : copies_) lanes_->await(copy.end);
  report_ended();
  const Lock lock(staged_.mutex);
  while (staged_.num_in_flight > 0) staged_.progress.wait(staged_.mutex);
}

void GpuEngine::close() {
  process_.require("this GpuEngine");
  if (std::exchange(closed_, true)) return;
  if (reads_) reads_->close();
  if (writes_) writes_->close();
  for (const Copy& copy : copies_) lanes_->await(copy.end);
  report_ended();
}

int64_t GpuEngine::num_in_flight() const {
  process_.require("this GpuEngine");
  const Lock lock(staged_.mutex);
  return num_unreported_copies_ + staged_.num_in_flight;
}

LinkStats GpuEngine::stats(Link link) {
  process_.require("this GpuEngine");
  report_ended();
  if (link == Link::kHostToDevice || link == Link::kDeviceToHost) return copy_stats_[index(link)];
  const Lock lock(staged_.mutex);
  return staged_.stats[index(link)];
}

double GpuEngine::stall_seconds() {
  process_.require("this GpuEngine");
  measure_stalls();
  return stall_seconds_;
}

void GpuEngine::measure_stalls() {
  while (!stalls_.empty() && lanes_->passed(stalls_.front().end)) {
    stall_seconds_ += lanes_->seconds(stalls_.front().begin, stalls_.front().end);
    stalls_.pop_front();
  }
}

}  // namespace gemini
