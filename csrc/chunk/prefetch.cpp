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

class Prefetcher {
 public:
  Prefetcher(Residency& chunks, const Schedule& schedule, const PrefetchWindow& window)
      : chunks_(chunks),
        schedule_(schedule),
        moment_(window.moment),
        slots_(window.max_in_flight - chunks.num_incoming()),
        lowest_limit_(window.limit_now),
        seen_(static_cast<size_t>(chunks.size()), false) {
    for (const Chunk& chunk : chunks.all()) {
      if (chunk.pins > 0 && !chunk.resident() && !chunk.arriving()) claimed_ += chunk.nbytes;
    }
  }

  Actions run(const DeviceLimit& limit) {
    const int64_t end = moment_ + std::min(schedule_.num_moments(), kLookaheadMoments);
    for (int64_t moment = moment_; moment < end; ++moment) {
      lowest_limit_ = std::min(lowest_limit_, limit.at(schedule_, moment));
      for (const ChunkId id : schedule_.access_at(moment)) {
        if (!consider(id, moment)) return std::move(actions_);
      }
    }
    return std::move(actions_);
  }

 private:
  // Returns false when nothing after this chunk should be prefetched.
  bool consider(ChunkId id, int64_t moment) {
    const Chunk& chunk = chunks_[id];
    const bool on_its_way = chunk.resident() || chunk.flight.has_value() || chunk.pins > 0;
    if (on_its_way || seen_[static_cast<size_t>(id)]) return true;
    seen_[static_cast<size_t>(id)] = true;
    if (!chunk.has_content()) {
      claimed_ += chunk.nbytes;  // it will be allocated by its own operator
      return true;
    }
    if (slots_ <= 0 || !make_room(chunk.nbytes, moment)) return false;
    --slots_;
    if (usage() + claimed_ + chunk.nbytes <= lowest_limit_) {
      actions_.push_back(start_incoming(chunks_, id));
    } else {
      claimed_ += chunk.nbytes;  // waits for an eviction under way
    }
    return true;
  }

  // Gives up chunks used later than `moment` until nbytes fit, at once or after the evictions under
  // way. Gives up nothing when that is not enough.
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
  int64_t moment_;
  int32_t slots_;
  int64_t lowest_limit_;
  int64_t claimed_ = 0;  // bytes that chunks not yet started will need
  std::vector<bool> seen_;
  Actions actions_;
};

}  // namespace

Actions prefetch(Residency& chunks, const Schedule& schedule, const DeviceLimit& limit,
                 const PrefetchWindow& window) {
  // The common case, everything resident or under way, must cost nothing.
  if (chunks.num_absent() == 0 || window.max_in_flight <= chunks.num_incoming()) return {};
  return Prefetcher(chunks, schedule, window).run(limit);
}

}  // namespace gemini
