#include "transfer/parked_blocks.h"

#include <algorithm>
#include <numeric>

#include "common/bytes.h"
#include "common/error.h"
#include "transfer/pages.h"

namespace gemini {
namespace {

// Each piece is an entry in the kernel's table of mappings, and one system call for each move.
constexpr size_t kMaxPieces = 16;
// Fresh pages are cheaper than moving a smaller piece, unless it is a whole window.
constexpr int64_t kLeastPieceBytes = 64 << 10;

}  // namespace

void ParkedBlocks::reserve(size_t num_pieces) {
  huge_.reserve(huge_.size() + num_pieces);
  small_.reserve(small_.size() + num_pieces);
}

void ParkedBlocks::add(char* address, const std::vector<Piece>& pieces, Home home) noexcept {
  for (const Piece& piece : pieces) {
    if (piece.nbytes < kLeastPieceBytes && pieces.size() > 1) {
      if (home == Home::kSlot) pages::discard(address, piece.nbytes);
      ledger_.drop_parked(piece.nbytes);
    } else {
      (piece.pages == Pages::kHuge ? huge_ : small_).push_back(Block{address, piece.nbytes, home});
    }
    address += piece.nbytes;
  }
}

void ParkedBlocks::move_to_slots(pages::Mover mover) noexcept {
  for (const Pages pages : {Pages::kHuge, Pages::kSmall}) {
    std::erase_if(pages == Pages::kHuge ? huge_ : small_, [&](Block& block) {
      if (block.home == Home::kSlot || move_to_slot(block, pages, mover)) return false;
      ledger_.drop_parked(block.nbytes);  // whoever owns the window reserves its addresses
      return true;
    });
  }
}

bool ParkedBlocks::move_to_slot(Block& block, Pages pages, pages::Mover mover) const noexcept {
  char* slot = nullptr;
  try {
    slot = pages::reserve(block.nbytes, pages == Pages::kHuge ? kHugePageBytes : kPageBytes);
  } catch (const Error&) {
    return false;
  }
  if (!mover(block.address, slot, block.nbytes, pages::Source::kKept)) {
    pages::discard(slot, block.nbytes);
    return false;
  }
  block = Block{slot, block.nbytes, Home::kSlot};
  return true;
}

std::vector<Piece> ParkedBlocks::take(int64_t span_bytes) {
  std::vector<Piece> taken;
  taken.reserve(kMaxPieces + 2);  // push_back must not throw: a taken piece would be lost
  small_.reserve(small_.size() + 1);
  int64_t missing_bytes = whole_huge_pages(span_bytes);
  const int64_t tail_bytes = span_bytes - missing_bytes;
  missing_bytes -= take_from(huge_, Pages::kHuge, missing_bytes, taken);
  const int64_t small_bytes =
      std::accumulate(small_.begin(), small_.end(), int64_t{0},
                      [](int64_t sum, const Block& block) { return sum + block.nbytes; });
  if (missing_bytes > small_bytes) {
    taken.push_back(Piece{nullptr, missing_bytes, Pages::kHuge});
    missing_bytes = 0;
  }
  missing_bytes += tail_bytes;
  missing_bytes -= take_from(small_, Pages::kSmall, missing_bytes, taken);
  if (missing_bytes >= kLeastPieceBytes && !huge_.empty()) {
    split_huge_page();
    missing_bytes -= take_from(small_, Pages::kSmall, missing_bytes, taken);
  }
  if (missing_bytes > 0) taken.push_back(Piece{nullptr, missing_bytes, Pages::kSmall});
  return taken;
}

// Moves up to `missing_bytes` to the end of `taken`, and returns the number of bytes: from the
// smallest block that has them all, the last parked among equals; else all of the largest block,
// and so on.
int64_t ParkedBlocks::take_from(Blocks& blocks, Pages pages, int64_t missing_bytes,
                                std::vector<Piece>& taken) {
  int64_t taken_bytes = 0;
  while (missing_bytes > 0 && !blocks.empty() && taken.size() < kMaxPieces) {
    if (missing_bytes < kLeastPieceBytes && !taken.empty()) break;
    const auto is_better = [&](const Block& one, const Block& other) {
      const bool has_all = one.nbytes >= missing_bytes;
      if (has_all != (other.nbytes >= missing_bytes)) return has_all;
      return has_all ? one.nbytes < other.nbytes : one.nbytes > other.nbytes;
    };
    const auto best = std::prev(std::min_element(blocks.rbegin(), blocks.rend(), is_better).base());
    const int64_t part_bytes = std::min(best->nbytes, missing_bytes);
    if (part_bytes < missing_bytes && part_bytes < kLeastPieceBytes) break;
    taken.push_back(Piece{best->address, part_bytes, pages, best->home});
    taken_bytes += part_bytes;
    missing_bytes -= part_bytes;
    best->address += part_bytes;
    best->nbytes -= part_bytes;
    if (best->nbytes >= kLeastPieceBytes) continue;
    if (best->nbytes > 0) {
      if (best->home == Home::kSlot) pages::discard(best->address, best->nbytes);
      ledger_.drop_parked(best->nbytes);
    }
    blocks.erase(best);
  }
  return taken_bytes;
}

// Converts the last huge page of the smallest huge block to a block of small pages.
void ParkedBlocks::split_huge_page() {
  const auto block =
      std::min_element(huge_.begin(), huge_.end(),
                       [](const Block& a, const Block& b) { return a.nbytes < b.nbytes; });
  block->nbytes -= kHugePageBytes;
  small_.push_back(Block{block->address + block->nbytes, kHugePageBytes, block->home});
  if (block->nbytes == 0) huge_.erase(block);
}

void ParkedBlocks::drop(int64_t nbytes) {
  while (nbytes > 0 && !(huge_.empty() && small_.empty())) {
    const bool is_huge = small_.empty() || (nbytes >= kHugePageBytes && !huge_.empty());
    Blocks& blocks = is_huge ? huge_ : small_;
    const int64_t wanted_bytes =
        is_huge ? std::max(whole_huge_pages(nbytes), kHugePageBytes) : round_up(nbytes, kPageBytes);
    const int64_t part_bytes = std::min(blocks.front().nbytes, wanted_bytes);
    drop_front(blocks, part_bytes);
    nbytes -= part_bytes;
  }
}

// Returns the first part of the oldest block to the system.
void ParkedBlocks::drop_front(Blocks& blocks, int64_t nbytes) {
  Block& block = blocks.front();
  if (block.home == Home::kWindow) {
    pages::reserve_at(block.address, nbytes);
  } else {
    pages::release(block.address, nbytes);
  }
  ledger_.drop_parked(nbytes);
  block.address += nbytes;
  block.nbytes -= nbytes;
  if (block.nbytes == 0) blocks.erase(blocks.begin());
}

void ParkedBlocks::drop_all() noexcept {
  for (Blocks* blocks : {&huge_, &small_}) {
    for (const Block& block : *blocks) {
      if (block.home == Home::kSlot) pages::discard(block.address, block.nbytes);
      ledger_.drop_parked(block.nbytes);
    }
    blocks->clear();
  }
}

}  // namespace gemini
