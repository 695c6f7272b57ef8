#include "chunk/prefetch.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "chunk/eviction.h"
#include "chunk/room.h"

namespace gemini {

namespace {

// How far ahead a walk looks. There are a few dozen operators between two chunks; further ahead
// DEVICE has no room for fetched chunks.
constexpr int64_t kLookaheadMoments = 256;

// Transfers in flight take room from chunks that could stay: beyond two transfers they may have 1 /
// kPartInFlight of the limit.
constexpr int64_t kAlwaysInFlight = 2;
constexpr int64_t kPartInFlight = 8;

// The room that a plan leaves in every period from the current one to a moment ahead, besides its
// operands, the chunks that it keeps and those fetched ahead. Without a plan everything fits.
// Moments are queried in ascending order, so one number is enough.
class Reservations {
 public:
  Reservations(const Schedule& schedule, const DeviceLimit& limit, const PrefetchWindow& window)
      : schedule_(schedule), limit_(limit), reached_(window.moment) {
    if (!schedule_.planned()) return;
    const int64_t under_way = window.moment - 1 + schedule_.num_moments();
    free_ = window.limit_now - schedule_.planned_bytes(under_way);
  }

  // Whether `nbytes` may be on DEVICE from now until `moment`.
  [[nodiscard]] bool fits(int64_t nbytes, int64_t moment) {
    if (!schedule_.planned()) return true;
    reach(moment);
    return nbytes <= free_;
  }
  void take(int64_t nbytes, int64_t moment) {
    if (!schedule_.planned()) return;
    reach(moment);
    free_ -= nbytes;
  }

 private:
  void reach(int64_t moment) {
    for (; reached_ < moment; ++reached_) {
      free_ = std::min(free_, limit_.at(schedule_, reached_) - schedule_.planned_bytes(reached_));
    }
  }

  const Schedule& schedule_;
  const DeviceLimit& limit_;
  int64_t reached_;  // earlier periods are counted
  int64_t free_ = 0;
};

class Prefetcher {
 public:
  Prefetcher(Residency& chunks, const Schedule& schedule, const Choices& choices,
             const DeviceLimit& limit, const PrefetchWindow& window)
      : chunks_(chunks),
        schedule_(schedule),
        choices_(choices),
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
    for (const ChunkId id : chunks.pinned(Tier::kDevice)) {
      if (!chunks[id].resident() && !chunks[id].arriving()) claimed_ += chunks[id].nbytes;
    }
  }

  Actions run() {
    bring_awaited();
    if (enough_beside(0)) return std::move(actions_);  // whatever the walk would find
    const int64_t end = moment_ + std::min(schedule_.num_moments(), kLookaheadMoments);
    for (int64_t moment = moment_; moment < end; ++moment) {
      // With a plan, the reservations know the room in later periods.
      if (!schedule_.planned())
        lowest_limit_ = std::min(lowest_limit_, limit_.at(schedule_, moment));
      const auto chunks = schedule_.access_at(moment);
      if (schedule_.on_host(moment)) {  // a copy on DEVICE is void afterwards
        for (const ChunkId id : chunks) seen_[static_cast<size_t>(id)] = true;
        continue;
      }
      const auto flags = schedule_.flags_at(moment);
      for (size_t i = 0; i < chunks.size(); ++i) {
        if (choices_.has(chunks[i])) {
          for (const ChunkId likely : choices_.likely(chunks[i])) {
            if (!consider(likely, moment, false)) return std::move(actions_);
          }
          continue;
        }
        const bool kept = !flags.empty() && (flags[i] & kKeep) != 0;
        if (!consider(chunks[i], moment, kept)) return std::move(actions_);
      }
    }
    return std::move(actions_);
  }

 private:
  // Fetches the chunks that certainly follow the current operator.
  void bring_awaited() {
    for (const ChunkId id : choices_.awaited()) {
      const Chunk& chunk = chunks_[id];
      if (!chunk.absent() || chunk.pinned_on(Tier::kHost)) continue;
      if (!make_room(chunk.nbytes, moment_)) return;
      bring(id);
    }
  }

  void bring(ChunkId id) {
    const int64_t nbytes = chunks_[id].nbytes;
    --slots_;
    ++incoming_;
    incoming_bytes_ += nbytes;
    if (usage() + claimed_ + nbytes <= lowest_limit_) {
      actions_.push_back(start_incoming(chunks_, id));
    } else {
      claimed_ += nbytes;  // waits for an eviction in flight
    }
  }

  // Returns false if nothing after this chunk should be prefetched. `kept`: the plan keeps it there
  // until this use.
  bool consider(ChunkId id, int64_t moment, bool kept) {
    if (seen_[static_cast<size_t>(id)]) return true;
    seen_[static_cast<size_t>(id)] = true;
    const Chunk& chunk = chunks_[id];
    if (chunk.pinned_on(Tier::kHost)) return true;  // is being written there
    if (chunk.resident() || chunk.flight.has_value() || chunk.pinned_on(Tier::kDevice)) {
      if (!chunk.pinned_on(Tier::kDevice) && !kept) reserved_.take(chunk.nbytes, moment);
      return true;
    }
    if (!chunk.has_content()) {  // its own operator will allocate it
      if (!schedule_.planned()) claimed_ += chunk.nbytes;
      return true;
    }
    if (slots_ <= 0 || enough_beside(chunk.nbytes) || !reserved_.fits(chunk.nbytes, moment) ||
        !make_room(chunk.nbytes, moment)) {
      return false;
    }
    reserved_.take(chunk.nbytes, moment);
    bring(id);
    return true;
  }

  // Whether the transfers in flight leave no room in their part of the limit for `nbytes` more.
  [[nodiscard]] bool enough_beside(int64_t nbytes) const {
    return incoming_ >= kAlwaysInFlight &&
           (incoming_bytes_ + nbytes) * kPartInFlight > lowest_limit_;
  }

  // Evicts chunks used later than `moment` until `nbytes` fit, at once or after the evictions in
  // flight. Evicts nothing if that is not enough; flushes in flight may turn into evictions
  // nevertheless.
  bool make_room(int64_t nbytes, int64_t moment) {
    const Policy policy = Belady{&schedule_, &choices_, moment_, moment};
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
  const Choices& choices_;
  const DeviceLimit& limit_;
  Reservations reserved_;
  int64_t moment_;
  int32_t slots_;
  int64_t lowest_limit_;
  int64_t incoming_ = 0;  // transfers to DEVICE, and their bytes
  int64_t incoming_bytes_ = 0;
  int64_t claimed_ = 0;  // bytes that chunks not started yet will need
  std::vector<bool> seen_;
  Actions actions_;
};

}  // namespace

Actions prefetch(Residency& chunks, const Schedule& schedule, const Choices& choices,
                 const DeviceLimit& limit, const PrefetchWindow& window) {
  // The common case, everything resident or in flight, must cost nothing.
  if (chunks.num_absent() == 0) return {};
  if (window.max_in_flight <= chunks.num_incoming() && choices.awaited().empty()) return {};
  return Prefetcher(chunks, schedule, choices, limit, window).run();
}

}  // namespace gemini
