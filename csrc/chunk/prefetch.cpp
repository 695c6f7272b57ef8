#include "chunk/prefetch.h"

#include <algorithm>
#include <optional>
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

// What a plan leaves free in every period from the one under way to some moment ahead, beside its
// operands, what it keeps and what is there ahead of its use. Everything fits where there is no
// plan. Moments are asked for in their order: one number is enough.
class Reservations {
 public:
  Reservations(const Schedule& schedule, const DeviceLimit& limit, const PrefetchWindow& window)
      : schedule_(schedule), limit_(limit), reached_(window.moment) {
    if (!schedule_.planned()) return;
    const int64_t under_way = window.moment - 1 + schedule_.num_moments();
    free_ = window.limit_now - schedule_.planned_bytes(under_way);
  }

  // Whether nbytes may be on DEVICE from now until `moment`.
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
  int64_t reached_;  // the periods before it are counted
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
    if (enough_beside(0)) return std::move(actions_);  // whatever the walk finds
    const int64_t end = moment_ + std::min(schedule_.num_moments(), kLookaheadMoments);
    for (int64_t moment = moment_; moment < end; ++moment) {
      // With a plan, what later periods have room for is asked of the reservations.
      if (!schedule_.planned())
        lowest_limit_ = std::min(lowest_limit_, limit_.at(schedule_, moment));
      const auto chunks = schedule_.access_at(moment);
      if (schedule_.on_host(moment)) {  // what it has on DEVICE before is void afterwards
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
  // What the operator under way is certain to be followed by.
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
      claimed_ += nbytes;  // waits for an eviction under way
    }
  }

  // Returns false when nothing after this chunk should be prefetched. `kept`: the plan has it there
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
    if (!chunk.has_content()) {  // it will be allocated by its own operator
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

  // Whether what is under way leaves no part of the limit for nbytes more.
  [[nodiscard]] bool enough_beside(int64_t nbytes) const {
    return incoming_ >= kAlwaysInFlight &&
           (incoming_bytes_ + nbytes) * kPartInFlight > lowest_limit_;
  }

  // Gives up chunks used later than `moment` until nbytes fit, at once or after the evictions under
  // way. Gives up nothing when that is not enough; what is being flushed may then leave all the
  // same.
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
  int64_t claimed_ = 0;  // bytes that chunks not yet started will need
  std::vector<bool> seen_;
  Actions actions_;
};

}  // namespace

Actions prefetch(Residency& chunks, const Schedule& schedule, const Choices& choices,
                 const DeviceLimit& limit, const PrefetchWindow& window) {
  // The common case, everything resident or under way, must cost nothing.
  if (chunks.num_absent() == 0) return {};
  if (window.max_in_flight <= chunks.num_incoming() && choices.awaited().empty()) return {};
  return Prefetcher(chunks, schedule, choices, limit, window).run();
}

}  // namespace gemini
