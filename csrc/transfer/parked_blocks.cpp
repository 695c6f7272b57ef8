#include "transfer/parked_blocks.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/bytes.h"
#include "transfer/pages.h"

namespace gemini {
namespace {

// Each piece is an entry in the kernel's table of mappings, and a call each time it moves.
constexpr size_t kMaxPieces = 16;
// What is left of a block and smaller than this goes back to the system.
constexpr int64_t kLeastRestBytes = 256 << 10;

int64_t whole_huge_pages(int64_t nbytes) { return nbytes / kHugePageBytes * kHugePageBytes; }

}  // namespace

int64_t ParkedBlocks::Block::nbytes() const noexcept {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

void ParkedBlocks::add(char* address, std::vector<int64_t> sizes) noexcept {
  blocks_.push_back(Block{address, std::move(sizes)});
}

std::vector<Piece> ParkedBlocks::take(int64_t span_bytes) {
  std::vector<Piece> taken;
  const auto same = std::find_if(blocks_.rbegin(), blocks_.rend(),
                                 [&](const Block& block) { return block.nbytes() == span_bytes; });
  if (same != blocks_.rend()) {
    cut_front(*same, span_bytes, taken);
    blocks_.erase(std::prev(same.base()));
    return taken;
  }
  if (take_huge_pages(whole_huge_pages(span_bytes), taken)) {
    take_tail(span_bytes - whole_huge_pages(span_bytes), taken);
  }
  return taken;
}

// Whether all `missing_bytes` of huge pages were there.
bool ParkedBlocks::take_huge_pages(int64_t missing_bytes, std::vector<Piece>& taken) {
  for (size_t index = blocks_.size(); index-- > 0 && missing_bytes > 0;) {
    Block& block = blocks_[index];
    const int64_t usable_bytes = std::min(missing_bytes, whole_huge_pages(block.nbytes()));
    if (usable_bytes == 0 || taken.size() + block.sizes.size() > kMaxPieces) continue;
    cut_front(block, usable_bytes, taken);
    missing_bytes -= usable_bytes;
    drop_if_small(index);
  }
  return missing_bytes == 0;
}

// Takes what lies behind the huge pages of a window from behind those of a block: the block where
// least is left over. No huge page is split for it.
void ParkedBlocks::take_tail(int64_t nbytes, std::vector<Piece>& taken) {
  if (nbytes == 0) return;
  size_t best = blocks_.size();
  int64_t least_bytes = kHugePageBytes;
  for (size_t index = 0; index < blocks_.size(); ++index) {
    const int64_t tail_bytes = blocks_[index].nbytes() % kHugePageBytes;
    if (tail_bytes < nbytes || tail_bytes >= least_bytes) continue;
    best = index;
    least_bytes = tail_bytes;
  }
  if (best == blocks_.size()) return;
  Block& block = blocks_[best];
  if (taken.size() + block.sizes.size() > kMaxPieces) return;
  cut_back(block, nbytes, taken);
  drop_if_small(best);
}

// Removes a block that is used up, or is too small to be worth a mapping.
void ParkedBlocks::drop_if_small(size_t index) noexcept {
  const Block& block = blocks_[index];
  const int64_t rest_bytes = block.nbytes();
  if (rest_bytes >= kLeastRestBytes) return;
  if (rest_bytes > 0) {
    pages::discard(block.address, rest_bytes);  // what was taken must not be lost
    ledger_.drop_parked(rest_bytes);
  }
  blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(index));
}

// Moves the first `nbytes` of a block to the end of `taken`.
void ParkedBlocks::cut_front(Block& block, int64_t nbytes, std::vector<Piece>& taken) {
  taken.reserve(taken.size() + block.sizes.size());
  size_t num_used = 0;
  while (nbytes > 0) {
    int64_t& size = block.sizes[num_used];
    const int64_t part_bytes = std::min(size, nbytes);
    taken.push_back(Piece{block.address, part_bytes});
    block.address += part_bytes;
    nbytes -= part_bytes;
    size -= part_bytes;
    if (size == 0) ++num_used;
  }
  block.sizes.erase(block.sizes.begin(),
                    block.sizes.begin() + static_cast<std::ptrdiff_t>(num_used));
}

// Moves the last `nbytes` of a block to the end of `taken`.
void ParkedBlocks::cut_back(Block& block, int64_t nbytes, std::vector<Piece>& taken) {
  taken.reserve(taken.size() + block.sizes.size());
  char* end = block.address + block.nbytes();
  while (nbytes > 0) {
    int64_t& size = block.sizes.back();
    const int64_t part_bytes = std::min(size, nbytes);
    end -= part_bytes;
    taken.push_back(Piece{end, part_bytes});
    nbytes -= part_bytes;
    size -= part_bytes;
    if (size == 0) block.sizes.pop_back();
  }
}

void ParkedBlocks::drop_oldest() {
  const Block& block = blocks_.front();
  const int64_t nbytes = block.nbytes();
  pages::release(block.address, nbytes);
  ledger_.drop_parked(nbytes);
  blocks_.erase(blocks_.begin());
}

void ParkedBlocks::drop_all() noexcept {
  for (const Block& block : blocks_) {
    pages::discard(block.address, block.nbytes());
    ledger_.drop_parked(block.nbytes());
  }
  blocks_.clear();
}

}  // namespace gemini
