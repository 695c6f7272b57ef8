#include "chunk/host_use.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "chunk/room.h"
#include "common/error.h"
#include "common/size_text.h"

namespace gemini {

namespace {

constexpr int64_t kMaxOutgoing = 4;         // enough to keep a link busy between two operators
constexpr int64_t kLookaheadMoments = 256;  // the same as for prefetch

// Needs bytes on HOST that are not reserved yet.
bool needs_place(const Chunk& chunk) {
  return !chunk.flight.has_value() && !chunk.valid.has(Tier::kHost);
}

OutOfBudget not_on_host(const Residency& chunks, const std::string& why) {
  return OutOfBudget("this operator uses its chunks on HOST, but " + why + " (" +
                     usage_text(chunks.ledger()) + ")");
}

// Drops HOST duplicates until `nbytes` are free, or none is left.
void make_room_on_host(Residency& chunks, const Policy& policy, int64_t nbytes, Actions& actions) {
  while (nbytes > chunks.ledger().free_bytes(Tier::kHost)) {
    const std::optional<ChunkId> duplicate = next_host_duplicate(chunks, policy);
    if (!duplicate.has_value()) return;
    actions.push_back(chunks.drop(*duplicate, Tier::kHost));
  }
}

}  // namespace

Actions admit_on_host(Residency& chunks, const Policy& policy, std::span<const ChunkId> wanted) {
  int64_t need = 0;
  for (const ChunkId id : wanted) {
    const Chunk& chunk = chunks[id];
    if (!needs_place(chunk)) continue;
    if (chunk.has_content() && !chunk.resident()) {
      throw not_on_host(chunks, "chunk " + std::to_string(id) + " lies on DISK alone");
    }
    need += chunk.nbytes;
  }
  Actions actions;
  make_room_on_host(chunks, policy, need, actions);
  const bool may_wait = !chunks.in_flight().empty();
  if (need > chunks.ledger().free_bytes(Tier::kHost) && !may_wait) {
    chunks.undo(actions, 0);
    throw not_on_host(chunks, format_bytes(need) + " of them have no room there; raise host_bytes");
  }
  for (const ChunkId id : wanted) {
    const Chunk& chunk = chunks[id];
    if (!needs_place(chunk) || chunk.nbytes > chunks.ledger().free_bytes(Tier::kHost)) continue;
    actions.push_back(chunk.has_content()
                          ? chunks.start(id, ActionKind::kEvict, Tier::kDevice, Tier::kHost)
                          : chunks.allocate(id, Tier::kHost));
  }
  return actions;
}

bool fits_on_host(const Residency& chunks, std::span<const ChunkId> wanted) {
  int64_t need = 0;
  for (const ChunkId id : wanted) {
    const Chunk& chunk = chunks[id];
    const bool comes_to_host = chunk.flight.has_value() && chunk.flight->to == Tier::kHost;
    const bool there = chunk.valid.has(Tier::kHost) || (comes_to_host && !chunk.flight->stale);
    const bool goes_to_disk = chunk.flight.has_value() && chunk.flight->to == Tier::kDisk;
    if (chunk.pinned_on(Tier::kDevice) || goes_to_disk) return false;
    if (!there && chunk.has_content() && !chunk.resident()) return false;  // only on DISK
    if (!there && !comes_to_host) need += chunk.nbytes;
  }
  int64_t room = chunks.ledger().free_bytes(Tier::kHost);
  for (ChunkId id = 0; need > room && id < chunks.size(); ++id) {
    const bool droppable = chunks[id].has_host_duplicate();
    if (droppable && !std::ranges::binary_search(wanted, id)) room += chunks[id].nbytes;
  }
  return need <= room;
}

void evict_ahead(Residency& chunks, const Schedule& schedule, int64_t moment, Actions& actions) {
  if (!schedule.uses_host()) return;
  int64_t slots = kMaxOutgoing - std::ranges::count_if(chunks.in_flight(), [&](ChunkId id) {
                    return chunks[id].flight->from == Tier::kDevice;
                  });
  std::vector<bool> seen(static_cast<size_t>(chunks.size()), false);
  const int64_t end = moment + std::min(schedule.num_moments(), kLookaheadMoments);
  for (int64_t at = moment; at < end && slots > 0; ++at) {
    for (const ChunkId id : schedule.access_at(at)) {
      if (seen[static_cast<size_t>(id)]) continue;
      seen[static_cast<size_t>(id)] = true;
      const Chunk& chunk = chunks[id];
      const bool leaves = schedule.on_host(at) && chunk.dirty() &&
                          !chunk.pinned_on(Tier::kDevice) && !chunk.flight.has_value();
      if (!leaves || slots <= 0) continue;
      if (chunk.nbytes > chunks.ledger().free_bytes(Tier::kHost)) return;
      actions.push_back(chunks.start(id, ActionKind::kEvict, Tier::kDevice, Tier::kHost));
      --slots;
    }
  }
}

}  // namespace gemini
