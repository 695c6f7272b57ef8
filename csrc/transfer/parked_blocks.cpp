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
  int64_t missing_bytes = whole_huge_pages(span_bytes);
  for (size_t index = blocks_.size(); index-- > 0 && missing_bytes > 0;) {
    Block& block = blocks_[index];
    const int64_t usable_bytes = std::min(missing_bytes, whole_huge_pages(block.nbytes()));
    if (usable_bytes == 0 || taken.size() + block.sizes.size() > kMaxPieces) continue;
    cut_front(block, usable_bytes, taken);
    missing_bytes -= usable_bytes;
    const int64_t rest_bytes = block.nbytes();
    if (whole_huge_pages(rest_bytes) > 0) continue;
    if (rest_bytes > 0) {  // a tail that hardly any window is the size of
      pages::release(block.address, rest_bytes);
      ledger_.drop_parked(rest_bytes);
    }
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(index));
  }
  return taken;
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
