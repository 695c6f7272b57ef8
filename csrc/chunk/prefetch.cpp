#include "chunk/prefetch.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "chunk/eviction.h"
#include "chunk/room.h"

namespace gemini {

namespace {

// How far ahead a walk looks. Operators between two chunks are few tens; further ahead DEVICE has
// no room to hold what is fetched.
constexpr int64_t kLookaheadMoments = 256;

// Transfers under way take room from what could stay: beyond two of them, no more than this part of
// the limit.
constexpr int64_t kAlwaysInFlight = 2;
constexpr int64_t kPartInFlight = 8;

// What a plan leaves free in each period ahead, beside its operands, what it keeps and what is
// there ahead of its use. Everything fits where there is no plan.
class Reservations {
 public:
  Reservations(const Schedule& schedule, const DeviceLimit& limit, const PrefetchWindow& window)
      : schedule_(schedule), limit_(limit), first_(window.moment - 1) {
    if (schedule_.planned()) {
      free_.push_back(window.limit_now - schedule_.planned_bytes(first_ + schedule_.num_moments()));
    }
  }

  // Whether nbytes may be on DEVICE from now until `moment`.
  [[nodiscard]] bool fits(int64_t nbytes, int64_t moment) {
    if (!schedule_.planned()) return true;
    reach(moment);
    return std::ranges::all_of(until(moment), [&](int64_t bytes) { return nbytes <= bytes; });
  }
  void take(int64_t nbytes, int64_t moment) {
    if (!schedule_.planned()) return;
    reach(moment);
    for (int64_t& bytes : until(moment)) bytes -= nbytes;
  }

 private:
  // The periods from the one under way to the last before `moment`.
  std::span<int64_t> until(int64_t moment) {
    return std::span(free_).first(static_cast<size_t>(moment - first_));
  }
  void reach(int64_t moment) {
    for (int64_t at = first_ + static_cast<int64_t>(free_.size()); at < moment; ++at) {
      free_.push_back(limit_.at(schedule_, at) - schedule_.planned_bytes(at));
    }
  }

  const Schedule& schedule_;
  const DeviceLimit& limit_;
  int64_t first_;  // the moment of the operator under way
  std::vector<int64_t> free_;
};

class Prefetcher {
 public:
  Prefetcher(Residency& chunks, const Schedule& schedule, const DeviceLimit& limit,
             const PrefetchWindow& window)
      : chunks_(chunks),
        schedule_(schedule),
        limit_(limit),
        reserved_(schedule, limit, window),
        moment_(window.moment),
        slots_(window.max_in_flight - chunks.num_incoming()),
        lowest_limit_(window.limit_now),
        seen_(static_cast<size_t>(chunks.size()), false) {
    for (const ChunkId id : chunks.in_flight()) {
      if (!chunks[id].arriving()) continue;
      ++incoming_;
      incoming_bytes_ += chunks[id].nbytes;
    }
    for (const Chunk& chunk : chunks.all()) {
      if (chunk.pins > 0 && !chunk.resident() && !chunk.arriving()) claimed_ += chunk.nbytes;
    }
  }

  Actions run() {
    const int64_t end = moment_ + std::min(schedule_.num_moments(), kLookaheadMoments);
    for (int64_t moment = moment_; moment < end; ++moment) {
      // With a plan, what later periods have room for is asked of the reservations.
      if (!schedule_.planned())
        lowest_limit_ = std::min(lowest_limit_, limit_.at(schedule_, moment));
      for (const ChunkId id : schedule_.access_at(moment)) {
        if (!consider(id, moment)) return std::move(actions_);
      }
    }
    return std::move(actions_);
  }

 private:
  // Returns false when nothing after this chunk should be prefetched.
  bool consider(ChunkId id, int64_t moment) {
    if (seen_[static_cast<size_t>(id)]) return true;
    seen_[static_cast<size_t>(id)] = true;
    const Chunk& chunk = chunks_[id];
    if (chunk.resident() || chunk.flight.has_value() || chunk.pins > 0) {
      const bool in_plan = chunk.pins > 0 || schedule_.next(id, moment).kept();
      if (!in_plan) reserved_.take(chunk.nbytes, moment);
      return true;
    }
    if (!chunk.has_content()) {  // it will be allocated by its own operator
      if (!schedule_.planned()) claimed_ += chunk.nbytes;
      return true;
    }
    const bool enough = incoming_ >= kAlwaysInFlight &&
                        (incoming_bytes_ + chunk.nbytes) * kPartInFlight > lowest_limit_;
    if (slots_ <= 0 || enough || !reserved_.fits(chunk.nbytes, moment) ||
        !make_room(chunk.nbytes, moment)) {
      return false;
    }
    --slots_;
    ++incoming_;
    incoming_bytes_ += chunk.nbytes;
    reserved_.take(chunk.nbytes, moment);
    if (usage() + claimed_ + chunk.nbytes <= lowest_limit_) {
      actions_.push_back(start_incoming(chunks_, id));
    } else {
      claimed_ += chunk.nbytes;  // waits for an eviction under way
    }
    return true;
  }

  // Gives up chunks used later than `moment` until nbytes fit, at once or after the evictions under
  // way. Gives up nothing when that is not enough; what is being flushed may then leave all the
  // same.
  bool make_room(int64_t nbytes, int64_t moment) {
    const Policy policy = Belady{&schedule_, moment_, moment};
    const size_t mark = actions_.size();
    const TierLedger::Bytes peaks = chunks_.ledger().peaks();
    while (usage() + claimed_ + nbytes - chunks_.coming_free() > lowest_limit_) {
      const std::optional<ChunkId> victim = next_victim(chunks_, policy);
      if (!victim.has_value()) {
        chunks_.undo(actions_, mark);
        chunks_.ledger().set_peaks(peaks);
        return false;
      }
      remove_from_device(chunks_, policy, *victim, actions_);
    }
    return true;
  }

  [[nodiscard]] int64_t usage() const { return chunks_.ledger().usage(Tier::kDevice); }

  Residency& chunks_;
  const Schedule& schedule_;
  const DeviceLimit& limit_;
  Reservations reserved_;
  int64_t moment_;
  int32_t slots_;
  int64_t lowest_limit_;
  int64_t incoming_ = 0;  // transfers to DEVICE, and their bytes
  int64_t incoming_bytes_ = 0;
  int64_t claimed_ = 0;  // bytes that chunks not yet started will need
  std::vector<bool> seen_;
  Actions actions_;
};

}  // namespace

Actions prefetch(Residency& chunks, const Schedule& schedule, const DeviceLimit& limit,
                 const PrefetchWindow& window) {
  // The common case, everything resident or under way, must cost nothing.
  if (chunks.num_absent() == 0 || window.max_in_flight <= chunks.num_incoming()) return {};
  return Prefetcher(chunks, schedule, limit, window).run();
}

}  // namespace gemini
