#include <algorithm>
#include <charconv>
#include <map>
#include <sstream>

#include "ptx.h"

namespace gemini::standin {
namespace {

constexpr std::string_view kBlanks = " \t\r";

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

// Takes the first word, up to one of `ends`, off the text.
std::string_view take_word(std::string_view& text, std::string_view ends) {
  const size_t length = std::min(text.find_first_of(ends), text.size());
  const std::string_view word = text.substr(0, length);
  text = trimmed(text.substr(length));
  return word;
}

template <class T>
bool is_number(std::string_view text, T& value, int base = 10) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  return error == std::errc{} && end == text.data() + text.size();
}

// The operation as the table of operations has it: without what only hints at caches, or says
// where memory is (but for arguments).
std::string short_name(std::string_view name) {
  std::string kept;
  std::istringstream parts{std::string(name)};
  for (std::string part; std::getline(parts, part, '.');) {
    if (part == "global" || part == "ca" || part == "nc" || part == "wb" || part == "uni") continue;
    if (part == "to" && kept == "cvta")
      kept += ".to.global";
    else
      kept += (kept.empty() ? "" : ".") + part;
  }
  return kept;
}

// One kernel, from the line after its name on.
class KernelParser {
 public:
  explicit KernelParser(std::string_view name) { kernel_.name = name; }

  // False: that was the last line of the kernel.
  bool take(std::string_view line) {
    if (line == "}") return false;
    if (line.starts_with(".param")) {
      add_parameter(line);
    } else if (line.ends_with(":")) {
      labels_[std::string(line.substr(0, line.size() - 1))] = kernel_.code.size();
    } else if (line.ends_with(";") && !line.starts_with(".")) {
      add_instruction(line.substr(0, line.size() - 1));
    } else if (!is_declaration(line)) {
      throw PtxError("not understood: " + std::string(line));
    }
    return true;
  }

  PtxKernel finish() {
    for (const auto& [instruction, label] : branches_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) throw PtxError("no label " + label);
      kernel_.code[instruction].target = found->second;
    }
    return std::move(kernel_);
  }

 private:
  // Registers are made where they are first named.
  static bool is_declaration(std::string_view line) {
    return line == "{" || line == ")" || line.starts_with(".reg") || line.starts_with(".maxntid");
  }

  // .param .align 8 .b8 NAME[24]
  void add_parameter(std::string_view line) {
    const size_t open = line.find('[');
    const size_t before = line.find_last_of(kBlanks, open) + 1;
    size_t nbytes = 0;
    if (open == std::string_view::npos || line.find(".b8") == std::string_view::npos ||
        !is_number(line.substr(open + 1, line.find(']') - open - 1), nbytes)) {
      throw PtxError("not understood: " + std::string(line));
    }
    const auto& all = kernel_.parameters;
    const size_t end = all.empty() ? 0 : all.back().offset + all.back().nbytes;
    kernel_.parameters.push_back({(end + 15) / 16 * 16, nbytes});
    kernel_.parameter_bases.push_back(register_of(line.substr(before, open - before)));
  }

  void add_instruction(std::string_view text) {
    Instruction made;
    made.text = text;
    if (text.starts_with("@")) {
      text.remove_prefix(1);
      made.guard_negated = text.starts_with("!");
      if (made.guard_negated) text.remove_prefix(1);
      made.guard = register_of(take_word(text, kBlanks));
    }
    const std::string name = short_name(take_word(text, kBlanks));
    if (name == "bra") {
      made.flow = Flow::kBranch;
      branches_.emplace_back(kernel_.code.size(), text);
    } else if (name == "ret") {
      made.flow = Flow::kReturn;
    } else {
      made.operation = find_operation(name);
      if (made.operation == nullptr) throw PtxError("unknown instruction: " + made.text);
      add_operands(text, name.starts_with("st."), made);
    }
    kernel_.code.push_back(std::move(made));
  }

  // What a store writes to is memory: all its operands are read.
  void add_operands(std::string_view text, bool is_store, Instruction& made) {
    const bool first_is_vector = text.starts_with("{");
    bool in_first = true;
    while (!text.empty()) {
      const char next = text.front();
      if (next == ',' || next == '{' || next == '}' || next == ']' || next == '|') {
        in_first &= next != '}' && (next != ',' || first_is_vector);
        text = trimmed(text.substr(1));
      } else if (next == '[') {
        text.remove_prefix(1);
        made.from.push_back(register_of(take_word(text, "+]")));
        if (text.starts_with("+") && !is_number(take_word(text, "]").substr(1), made.offset)) {
          throw PtxError("not understood: " + made.text);
        }
      } else {
        const int number = register_of(take_word(text, ", \t{}]|"));
        (in_first && !is_store ? made.to : made.from).push_back(number);
      }
    }
  }

  // The register of a name; a number has one that holds it.
  int register_of(std::string_view name) {
    const auto [place, is_new] =
        numbers_.try_emplace(std::string(name), static_cast<int>(kernel_.registers.size()));
    if (!is_new) return place->second;
    kernel_.registers.push_back({});
    if (name == "%tid.x") kernel_.thread_register = place->second;
    if (name == "%ctaid.x") kernel_.block_register = place->second;
    const char first = name.empty() ? ' ' : name.front();
    if (first == '-' || (first >= '0' && first <= '9')) {
      kernel_.registers.back().fill(value_of(name));
    }
    return place->second;
  }

  static uint64_t value_of(std::string_view text) {
    int64_t number = 0;
    uint32_t bits = 0;
    if (text.starts_with("0f") && is_number(text.substr(2), bits, 16)) return bits;
    if (!is_number(text, number)) throw PtxError("not a number: " + std::string(text));
    return static_cast<uint64_t>(number);
  }

  PtxKernel kernel_;
  std::map<std::string, int, std::less<>> numbers_;
  std::map<std::string, size_t> labels_;
  std::vector<std::pair<size_t, std::string>> branches_;
};

}  // namespace

std::vector<PtxKernel> parse_ptx(std::string_view text) {
  constexpr std::string_view kEntry = ".entry";
  std::vector<PtxKernel> kernels;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    const size_t entry = line.find(kEntry);
    if (entry == std::string::npos) continue;
    std::string_view rest = trimmed(std::string_view(line).substr(entry + kEntry.size()));
    KernelParser parser(take_word(rest, "( \t"));
    while (std::getline(lines, line)) {
      std::string_view own = trimmed(std::string_view(line).substr(0, line.find("//")));
      if (own.ends_with(",")) own.remove_suffix(1);  // between parameters
      if (!own.empty() && !parser.take(own)) break;
    }
    kernels.push_back(parser.finish());
  }
  return kernels;
}

}  // namespace gemini::standin
