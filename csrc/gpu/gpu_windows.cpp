#include "gpu/gpu_windows.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/bytes.h"
#include "common/debug.h"
#include "common/error.h"
#include "common/size_text.h"

namespace gemini {
namespace {

constexpr int kPoisonLevel = 3;
constexpr uint8_t kPoison = 0xFF;

}  // namespace

GpuBlock::GpuBlock(std::shared_ptr<GpuLanes> lanes, int64_t nbytes)
    : lanes_(std::move(lanes)), nbytes_(nbytes), handle_(lanes_->driver().create_block(nbytes)) {}

GpuBlock::~GpuBlock() { lanes_->driver().destroy_block(handle_); }

Uses& GpuWindow::uses() {
  if (!mapped()) throw StateError("the window is not mapped");
  return uses_;
}

bool GpuBlock::is_home() const {
  return std::ranges::any_of(shown_by, [](const GpuFrame* frame) { return !frame->floats(); });
}

bool GpuFrame::shows_parked() const {
  return !shown_.empty() &&
         std::ranges::all_of(shown_, [](const auto& block) { return block && block->parked; });
}

int64_t GpuFrame::show(GpuLanes& lanes, const Blocks& blocks) {
  if (shown_ == blocks) return 0;
  if (poisoned_) lanes.await(lanes.mark(Lane::kCompute));  // a stray operator may be reading it
  if (poisoned_ || shown_.size() != blocks.size()) hide(lanes);
  shown_.resize(blocks.size());
  int64_t num_new = 0;
  for (size_t place = 0; place < blocks.size();) {
    const size_t first = place;
    while (place < blocks.size() && shown_[place] != blocks[place]) ++place;
    if (first < place) show(lanes, blocks, first, place);
    num_new += static_cast<int64_t>(place - first);
    while (place < blocks.size() && shown_[place] == blocks[place]) ++place;
  }
  return num_new;
}

void GpuFrame::show(GpuLanes& lanes, const Blocks& blocks, size_t first, size_t behind) {
  const int64_t nbytes = blocks.front()->nbytes();
  const auto address = [&](size_t place) {
    return address_ + place * static_cast<uint64_t>(nbytes);
  };
  try {
    for (size_t place = first; place < behind; ++place) {
      hide(lanes, place);
      const std::shared_ptr<GpuBlock>& block = blocks[place];
      block->shown_by.reserve(block->shown_by.size() + 1);
      lanes.driver().map(address(place), nbytes, block->handle());
      shown_[place] = block;
      block->shown_by.push_back(this);
    }
    lanes.driver().allow(address(first), static_cast<int64_t>(behind - first) * nbytes);
  } catch (...) {
    // A block that is mapped without access must not count as mapped.
    for (size_t place = first; place < behind; ++place) hide(lanes, place);
    throw;
  }
}

void GpuFrame::hide(GpuLanes& lanes) {
  if (poisoned_) poison_->unmap(address_, nbytes_);
  poisoned_ = false;
  for (size_t place = 0; place < shown_.size(); ++place) hide(lanes, place);
  shown_.clear();
  left_ = {};
}

void GpuFrame::hide(GpuLanes& lanes, const std::shared_ptr<GpuBlock>& block) {
  for (size_t place = 0; place < shown_.size(); ++place) {
    if (shown_[place] == block) hide(lanes, place);
  }
}

void GpuFrame::hide(GpuLanes& lanes, size_t place) {
  std::shared_ptr<GpuBlock>& shown = shown_[place];
  if (!shown) return;
  lanes.await(left_);
  const int64_t nbytes = shown->nbytes();
  lanes.driver().unmap(address_ + place * static_cast<uint64_t>(nbytes), nbytes);
  std::erase(shown->shown_by, this);
  shown.reset();
}

void GpuFrame::poison(GpuLanes& lanes) {
  if (poisoned_) return;
  hide(lanes);
  poison_->map(address_, nbytes_);
  poisoned_ = true;
}

void GpuPoison::map(GpuAddress address, int64_t nbytes) {
  GpuDriver& driver = lanes_->driver();
  const int64_t unit = driver.granularity();
  if (!block_) block_ = std::make_unique<GpuBlock>(lanes_, unit);
  int64_t done = 0;
  try {
    for (; done < nbytes; done += unit) {
      driver.map(address + static_cast<uint64_t>(done), unit, block_->handle());
    }
    driver.allow(address, nbytes);
  } catch (...) {
    unmap(address, done);
    throw;
  }
  if (!filled_) driver.fill(address, kPoison, unit, lanes_->stream(Lane::kCompute));
  filled_ = true;
}

void GpuPoison::unmap(GpuAddress address, int64_t nbytes) {
  const int64_t unit = lanes_->driver().granularity();
  for (int64_t done = 0; done < nbytes; done += unit) {
    lanes_->driver().unmap(address + static_cast<uint64_t>(done), unit);
  }
}

namespace {

int64_t reservation(int64_t total_bytes, int64_t num_windows, int64_t granularity) {
  if (total_bytes <= 0 || num_windows <= 0) {
    throw StateError("a window space needs a positive size, got " + std::to_string(total_bytes) +
                     " bytes in " + std::to_string(num_windows) + " windows");
  }
  return round_up(total_bytes, granularity) + num_windows * granularity;
}

int64_t not_negative(int64_t nbytes, const char* what) {
  if (nbytes >= 0) return nbytes;
  throw StateError(std::string(what) + " cannot be negative, got " + std::to_string(nbytes));
}

}  // namespace

GpuSpace::GpuSpace(std::shared_ptr<GpuLanes> lanes, int64_t total_bytes, int64_t num_windows)
    : lanes_(std::move(lanes)),
      reserved_bytes_(reservation(total_bytes, num_windows, lanes_->driver().granularity())),
      begin_(lanes_->driver().reserve(reserved_bytes_)),
      poison_(std::make_shared<GpuPoison>(lanes_)) {}

GpuSpace::~GpuSpace() {
  if (!process_.is_owner()) return;
  try {
    lanes_->await(lanes_->mark(Lane::kCompute));
  } catch (const Error&) {
    // The stream of the operators no longer exists, so neither do they.
  }
  try {
    for (const auto& window : windows_) {
      if (window->mapped()) lanes_->await(window->uses());
      window->frame_->hide(*lanes_);
    }
    lanes_->driver().release(begin_, reserved_bytes_);
  } catch (const Error&) {
    // A GPU that has failed releases nothing before the process ends.
  }
}

GpuWindow* GpuSpace::create(int64_t nbytes, Addresses addresses) {
  process_.require("this GpuSpace");
  if (nbytes <= 0) {
    throw StateError("a window needs a positive size, got " + std::to_string(nbytes));
  }
  const int64_t span_bytes = round_up(nbytes, lanes_->driver().granularity());
  if (span_bytes > reserved_bytes_ - used_bytes_) {
    throw OutOfBudget("a window of " + format_bytes(nbytes) + " does not fit: " +
                      format_bytes(used_bytes_) + " of " + format_bytes(reserved_bytes_) +
                      " reserved addresses are used; make the window space larger");
  }
  const GpuAddress address = begin_ + static_cast<uint64_t>(used_bytes_);
  auto frame = std::make_unique<GpuFrame>(address, span_bytes, addresses, poison_);
  begins_.reserve(begins_.size() + 1);
  windows_.push_back(std::unique_ptr<GpuWindow>(
      new GpuWindow(*this, std::move(frame), nbytes, span_bytes, addresses)));
  begins_.push_back(address);
  idle_.reserve(windows_.size());
  used_bytes_ += span_bytes;
  return windows_.back().get();
}

void GpuSpace::poison(GpuWindow& window) {
  process_.require("this GpuSpace");
  if (window.mapped()) throw StateError("a window with memory is not poisoned");
  window.frame_->poison(*lanes_);
}

int64_t GpuSpace::find(GpuAddress address) const {
  const auto after = std::ranges::upper_bound(begins_, address);
  if (after == begins_.begin()) return -1;
  const auto index = std::prev(after) - begins_.begin();
  const GpuWindow& window = *windows_[static_cast<size_t>(index)];
  if (window.floats() ||
      address - *std::prev(after) >= static_cast<uint64_t>(window.span_bytes())) {
    return -1;
  }
  return index;
}

GpuArena::GpuArena(std::shared_ptr<GpuLanes> lanes, int64_t capacity_bytes, int64_t unit_bytes)
    : lanes_(std::move(lanes)),
      capacity_bytes_(not_negative(capacity_bytes, "an arena's capacity")),
      unit_bytes_(not_negative(unit_bytes, "an arena's unit")) {}

int64_t GpuArena::block_bytes(const GpuWindow& window) const {
  const int64_t nbytes = window.span_bytes();
  if (unit_bytes_ == 0 || nbytes % unit_bytes_ != 0) return nbytes;
  return nbytes / unit_bytes_ <= kMostBlocks ? unit_bytes_ : nbytes;
}

void GpuArena::map_incoming(GpuWindow& window) {
  process_.require("this GpuArena");
  if (window.mapped()) throw StateError("the window is mapped already");
  const int64_t nbytes = window.span_bytes();
  if (nbytes > capacity() - mapped_bytes_) {
    throw OutOfBudget("a window of " + format_bytes(nbytes) + " does not fit DEVICE: " +
                      format_bytes(mapped_bytes_) + " of " + format_bytes(capacity()) +
                      " are mapped; unmap other windows, or raise device_bytes");
  }
  if (window.floats()) move_to_parked(window);
  Blocks blocks(static_cast<size_t>(nbytes / block_bytes(window)));
  mapped_bytes_ += nbytes;
  try {
    take_parked(window, blocks);
    while (parked_bytes_ > capacity() - mapped_bytes_) drop_oldest();
    for (std::shared_ptr<GpuBlock>& block : blocks) {
      if (!block) block = std::make_shared<GpuBlock>(lanes_, block_bytes(window));
    }
    num_mappings_ += window.frame_->show(*lanes_, blocks);
  } catch (...) {
    mapped_bytes_ -= nbytes;
    for (const std::shared_ptr<GpuBlock>& block : blocks) {
      if (block) park(block);
    }
    throw;
  }
  window.uses_ = {};
  for (const std::shared_ptr<GpuBlock>& block : blocks) window.uses_.include(block->uses);
  window.blocks_ = std::move(blocks);
  std::erase(window.space_.idle_, &window);
  peak_bytes_ = std::max(peak_bytes_, mapped_bytes_ + parked_bytes_);
}

void GpuArena::move_to_parked(GpuWindow& window) {
  PassedUses passed(*lanes_);
  GpuWindow* found = nullptr;
  for (GpuWindow* const idle : window.space_.idle_) {
    if (idle->span_bytes() != window.span_bytes() || !idle->frame_->shows_parked()) continue;
    const bool waits = !std::ranges::all_of(
        idle->frame_->shown(), [&](const auto& block) { return passed.contain(block->uses); });
    if (!found || !waits) found = idle;
    if (!waits) break;
  }
  if (found) std::swap(window.frame_, found->frame_);
}

void GpuArena::map(GpuWindow& window, Content content) {
  map_incoming(window);
  lanes_->wait(Lane::kCompute, window.uses());
  if (content == Content::kZeros) {
    lanes_->driver().fill(window.address(), 0, window.span_bytes(), lanes_->stream(Lane::kCompute));
  }
}

void GpuArena::take_parked(const GpuWindow& window, Blocks& taken) {
  const int64_t nbytes = block_bytes(window);
  const Blocks& shown = window.frame_->shown();
  for (size_t place = 0; place < std::min(taken.size(), shown.size()); ++place) {
    const auto own = std::ranges::find(parked_, shown[place]);
    if (own != parked_.end() && (*own)->nbytes() == nbytes) taken[place] = take(own);
  }
  const auto take_those = [&](auto&& suits) {
    std::ptrdiff_t at = 0;
    for (std::shared_ptr<GpuBlock>& block : taken) {
      if (block) continue;
      const auto found = std::find_if(parked_.begin() + at, parked_.end(), suits);
      if (found == parked_.end()) return;
      at = found - parked_.begin();
      block = take(found);
    }
  };
  const auto fits = [&](const auto& block) { return block->nbytes() == nbytes; };
  PassedUses passed(*lanes_);
  take_those([&](const auto& block) {
    return fits(block) && !block->is_home() && passed.contain(block->uses);
  });
  take_those([&](const auto& block) { return fits(block) && passed.contain(block->uses); });
  take_those(fits);
}

std::shared_ptr<GpuBlock> GpuArena::take(Blocks::iterator parked) {
  std::shared_ptr<GpuBlock> block = std::move(*parked);
  parked_.erase(parked);
  parked_bytes_ -= block->nbytes();
  block->parked = false;
  return block;
}

void GpuArena::park(const std::shared_ptr<GpuBlock>& block) {
  parked_.push_back(block);
  parked_bytes_ += block->nbytes();
  block->parked = true;
}

void GpuArena::unmap(GpuWindow& window, Spare spare) {
  process_.require("this GpuArena");
  if (!window.mapped()) throw StateError("the window is not mapped");
  window.uses().note(Lane::kCompute, lanes_->mark(Lane::kCompute));
  window.frame_->leave(window.uses());
  const Blocks blocks = std::exchange(window.blocks_, {});
  mapped_bytes_ -= window.span_bytes();
  for (const std::shared_ptr<GpuBlock>& block : blocks) {
    block->uses = window.uses_;
    park(block);
  }
  if (spare == Spare::kReturned) {
    const auto num_left = static_cast<std::ptrdiff_t>(blocks.size());
    std::rotate(parked_.begin(), parked_.end() - num_left, parked_.end());
    for (std::ptrdiff_t i = 0; i < num_left; ++i) drop_oldest();
  }
  if (debug_level() >= kPoisonLevel) window.frame_->poison(*lanes_);
  if (window.floats()) window.space_.idle_.push_back(&window);
}

void GpuArena::trim(int64_t parked_limit_bytes) {
  process_.require("this GpuArena");
  while (parked_bytes_ > std::max<int64_t>(parked_limit_bytes, 0)) drop_oldest();
}

void GpuArena::drop_oldest() {
  const std::shared_ptr<GpuBlock> block = parked_.front();
  lanes_->await(block->uses);
  while (!block->shown_by.empty()) block->shown_by.back()->hide(*lanes_, block);
  parked_.erase(parked_.begin());
  parked_bytes_ -= block->nbytes();
  block->parked = false;
}

}  // namespace gemini
