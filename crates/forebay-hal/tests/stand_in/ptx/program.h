// PTX as text to instructions that can be run (`lanes.h`): what NVIDIA's compilers make of kernels of the size of Forebay's.
// Whatever is not known here is refused by name, never passed over.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

typedef uint64_t u64;

struct Refused : std::runtime_error { using std::runtime_error::runtime_error; };

enum class Op {
  mov, add, sub, mul, mad, div, rem, abs, neg, min, max, and_, or_, xor_, not_, cnot, shl, shr, shf, prmt, bfi, bfe, lop3, popc, clz,
  brev, fma, sqrt, rcp, rsqrt, ex2, lg2, cvt, cvta, setp, selp, ld, st, atom, red, bra, ret, trap, call, bar, warp_bar, vote, shfl,
  match, redux, activemask, fence, nanosleep, nothing,
};
enum class Space : uint8_t { generic, global, shared, local, param, constant };
// The kind of a type; its size is beside it.
enum class As : uint8_t { bits, without_sign, with_sign, floating, predicate };
// What a word in the middle of an opcode says.
enum class Sub : uint8_t {
  none, eq, ne, lt, le, gt, ge, lo, ls, hi, hs, equ, neu, ltu, leu, gtu, geu, num, nan,
  add, min, max, and_, or_, xor_, exch, cas, inc, dec, any, all, uni, ballot, idx, bfly, up, down, left, right,
};

struct Type {
  As as = As::bits;
  uint8_t bytes = 0;
  unsigned bits() const { return bytes * 8u; }
};

struct Operand {
  enum Kind : uint8_t { nothing, reg, value, special } kind = nothing;
  bool negated = false;   // of a predicate
  uint32_t slot = 0;      // of a register; which special one
  u64 is = 0;             // a value, or what is added to the register
};

enum Special : uint32_t {
  tid_x, tid_y, tid_z, ntid_x, ntid_y, ntid_z, ctaid_x, ctaid_y, ctaid_z, nctaid_x, nctaid_y, nctaid_z, laneid, warpid, smid, nsmid,
  clock32, clock64, globaltimer, lanemask_eq, lanemask_lt, lanemask_le, lanemask_gt, lanemask_ge, dynamic_shared,
};

enum class Callee : uint8_t { malloc, free, vprintf };

struct Instruction {
  Op op = Op::nothing;
  Type type, from;              // `from`: of a conversion's source
  Space space = Space::generic;
  Sub sub = Sub::none, both = Sub::none;  // `both`: what a setp does with its third operand
  bool wide = false, high = false, sat = false, to = false, down = false, toward_zero = false, wraps = false, of_call = false;
  // How memory is ordered by it: what it does is seen by others in the order of the text, or it is read from where others are
  // (`strong`); what came before is seen before it; what others did is seen after it; only by its own block; never changes.
  bool strong = false, releases = false, acquires = false, of_block = false, kept = false;
  uint32_t guard = ~0u;         // a predicate's slot
  bool unless = false;
  Operand d, also, s[4];        // `also`: the second result
  uint8_t sources = 0;
  std::vector<Operand> several; // of a vector
  bool unpacks = false;
  uint32_t target = 0;
  Callee callee = Callee::malloc;
  unsigned line = 0;
};

struct Parameter { std::string name; size_t size, at; };

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  size_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
  uint32_t slots = 0;
  unsigned bound = 1024;
  bool dynamic_shared = false;
  std::vector<Instruction> code;
};

struct Program {
  std::map<std::string, Kernel> kernels;
  std::map<std::string, u64> globals;
  std::vector<std::pair<void*, size_t>> memory;
};

// Memory of a program's variables: who runs it says where that is.
typedef void* (*Allocate)(size_t);

class Parser {
 public:
  Parser(const char* text, Allocate allocate) : allocate_(allocate) { split(text); }

  std::unique_ptr<Program> parse() {
    program_.reset(new Program);
    while (at_ < tokens_.size()) top();
    return std::move(program_);
  }

 private:
  struct Token { std::string text; unsigned line; };
  struct Variable { Space space; u64 at; };
  Allocate allocate_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  std::unique_ptr<Program> program_;
  std::map<std::string, Variable> module_;
  size_t module_shared_ = 0;
  bool module_dynamic_ = false;
  // Of the kernel at hand.
  Kernel* kernel_ = nullptr;
  struct Registers { uint32_t first, count, width; Type type; };
  std::vector<std::map<std::string, Registers>> ranges_, names_;
  std::vector<std::map<std::string, Variable>> variables_;
  std::map<std::string, uint32_t> labels_;
  std::vector<std::pair<size_t, std::string>> jumps_;

  static bool part(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%' || c == '.'; }

  void split(const char* p) {
    unsigned line = 1;
    while (*p) {
      if (*p == '\n') line++;
      if (isspace((unsigned char)*p)) { p++; continue; }
      if (p[0] == '/' && p[1] == '/') { while (*p && *p != '\n') p++; continue; }
      if (p[0] == '/' && p[1] == '*') {
        for (p += 2; *p && !(p[0] == '*' && p[1] == '/'); p++) line += *p == '\n';
        if (*p) p += 2;
        continue;
      }
      if (*p == '"') {
        const char* b = p++;
        while (*p && *p != '"') p++;
        if (*p) p++;
        tokens_.push_back({std::string(b, p), line});
        continue;
      }
      if (part(*p)) {
        const char* b = p;
        // L1::evict_last and the like are parts of opcodes.
        while (part(*p) || (p[0] == ':' && p[1] == ':') || (p[0] == ':' && p > b && p[-1] == ':')) p++;
        tokens_.push_back({std::string(b, p), line});
        continue;
      }
      tokens_.push_back({std::string(1, *p++), line});
    }
  }

  [[noreturn]] void refuse(const std::string& what) const {
    unsigned line = at_ < tokens_.size() ? tokens_[at_].line : tokens_.empty() ? 0 : tokens_.back().line;
    throw Refused("line " + std::to_string(line) + ": " + what);
  }
  const std::string& see() const {
    if (at_ >= tokens_.size()) refuse("the text ends");
    return tokens_[at_].text;
  }
  std::string next() {
    std::string t = see();
    at_++;
    return t;
  }
  bool take(const char* t) {
    if (at_ < tokens_.size() && tokens_[at_].text == t) return at_++, true;
    return false;
  }
  void expect(const char* t) {
    if (!take(t)) refuse("'" + see() + "' where '" + t + "' is expected");
  }
  void skip_to(const char* t) { while (next() != t) {} }

  static bool number(const std::string& t, u64& v) {
    if (t.empty() || !isdigit((unsigned char)t[0])) return false;
    if (t[0] == '0' && (t[1] == 'f' || t[1] == 'F') && t.size() == 10) return v = strtoull(t.c_str() + 2, nullptr, 16), true;
    if (t[0] == '0' && (t[1] == 'd' || t[1] == 'D') && t.size() == 18) return v = strtoull(t.c_str() + 2, nullptr, 16), true;
    char* end;
    v = strtoull(t.c_str(), &end, 0);
    return *end == 0 || ((*end == 'U' || *end == 'u') && end[1] == 0);
  }

  static bool type_of(const std::string& t, Type& to) {
    if (t == "pred") return to = {As::predicate, 1}, true;
    if (t.size() < 2) return false;
    As as = t[0] == 'b' ? As::bits : t[0] == 'u' ? As::without_sign : t[0] == 's' ? As::with_sign : As::floating;
    if (!strchr("busf", t[0])) return false;
    for (unsigned bits : {8, 16, 32, 64, 128})
      if (t.compare(1, std::string::npos, std::to_string(bits)) == 0) return to = {as, uint8_t(bits / 8)}, true;
    return false;
  }

  // ".align 8 .b8 name[64]" and the like, after the space: name and size.
  struct Declared { std::string name; size_t size, align; bool open; Type type; };
  Declared declared() {
    Declared d{"", 0, 0, false, {}};
    if (take(".align")) { u64 v; if (!number(next(), v)) refuse("an alignment"); d.align = v; }
    std::string t = next();
    if (t[0] != '.' || !type_of(t.substr(1), d.type)) refuse("type " + t);
    if (take(".ptr")) {
      while (see()[0] == '.') { if (next() == ".align") next(); }
    }
    d.name = next();
    u64 n = 1;
    while (take("[")) {
      if (take("]")) { d.open = true; break; }
      u64 v;
      if (!number(next(), v)) refuse("a length");
      n *= v;
      expect("]");
    }
    if (!d.align) d.align = d.type.bytes;
    d.size = n * d.type.bytes;
    return d;
  }
  static size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

  void top() {
    std::string t = next();
    if (t == ".version" || t == ".target" || t == ".address_size") {
      next();
      while (take(",")) next();
    } else if (t == ".visible" || t == ".weak" || t == ".extern" || t == ".common") {
    } else if (t == ".global" || t == ".const") {
      Declared d = declared();
      auto* p = (char*)allocate_(d.size ? d.size : 1);
      program_->memory.push_back({p, d.size});
      module_[d.name] = {t == ".const" ? Space::constant : Space::global, (u64)p};
      program_->globals[d.name] = (u64)p;
      if (take("=")) {
        if (take("{")) {
          for (size_t i = 0; !take("}"); i++) {
            if (i * d.type.bytes >= d.size) refuse("more than " + d.name + " has room for");
            bool minus = take("-");
            u64 v;
            if (!number(next(), v)) refuse("a value of " + d.name);
            if (minus) v = -v;
            memcpy(p + i * d.type.bytes, &v, d.type.bytes);
            take(",");
          }
        } else {
          u64 v;
          if (!number(next(), v)) refuse("the value of " + d.name);
          memcpy(p, &v, d.type.bytes);
        }
      }
      expect(";");
    } else if (t == ".shared") {
      Declared d = declared();
      expect(";");
      if (d.open) {
        module_dynamic_ = true;
        module_[d.name] = {Space::shared, ~u64(0)};
        return;
      }
      module_shared_ = up(module_shared_, d.align);
      module_[d.name] = {Space::shared, module_shared_};
      module_shared_ += d.size;
    } else if (t == ".func") {
      // Known ones only, which the machine has: their declaration says nothing new.
      skip_to(";");
    } else if (t == ".entry") {
      entry();
    } else {
      at_--;
      refuse("'" + t + "'");
    }
  }

  void entry() {
    Kernel k;
    k.name = next();
    kernel_ = &k;
    ranges_ = names_ = {{}};
    variables_ = {{}};
    labels_.clear();
    jumps_.clear();
    k.shared_bytes = module_shared_;
    k.dynamic_shared = module_dynamic_;
    if (take("(")) {
      while (!take(")")) {
        expect(".param");
        Declared d = declared();
        k.parameter_bytes = up(k.parameter_bytes, d.align);
        k.parameters.push_back({d.name, d.size, k.parameter_bytes});
        variables_[0][d.name] = {Space::param, k.parameter_bytes};
        k.parameter_bytes += d.size;
        take(",");
      }
    }
    while (!take("{")) {
      std::string t = next();
      if (t == ".maxntid" || t == ".reqntid") {
        u64 all = 1, v;
        do {
          if (!number(next(), v)) refuse("a number of threads");
          all *= v;
        } while (take(","));
        k.bound = all;
      } else if (t == ".minnctapersm" || t == ".maxnreg") {
        next();
      } else if (t != ";") {
        refuse("'" + t + "'");
      }
    }
    for (unsigned depth = 1; depth;) {
      if (take("{")) {
        depth++;
        ranges_.emplace_back();
        names_.emplace_back();
        variables_.emplace_back();
      } else if (take("}")) {
        depth--;
        ranges_.pop_back();
        names_.pop_back();
        variables_.pop_back();
      } else {
        statement();
      }
    }
    for (auto& j : jumps_) {
      auto it = labels_.find(j.second);
      if (it == labels_.end()) refuse("no label " + j.second);
      k.code[j.first].target = it->second;
    }
    Instruction end;
    end.op = Op::ret;
    k.code.push_back(end);
    k.local_bytes = up(k.local_bytes, 16);
    k.shared_bytes = up(k.shared_bytes, 16);
    program_->kernels[k.name] = std::move(k);
  }

  void statement() {
    if (take(";")) return;
    if (at_ + 1 < tokens_.size() && tokens_[at_ + 1].text == ":") {
      labels_[next()] = kernel_->code.size();
      next();
      return;
    }
    const std::string t = see();
    if (t == ".reg") return next(), registers();
    if (t == ".local" || t == ".param") {
      next();
      Declared d = declared();
      expect(";");
      // What a call takes and gives is kept as a thread's own, too.
      kernel_->local_bytes = up(kernel_->local_bytes, d.align);
      variables_.back()[d.name] = {Space::local, kernel_->local_bytes};
      kernel_->local_bytes += d.size;
      return;
    }
    if (t == ".shared") {
      next();
      Declared d = declared();
      expect(";");
      kernel_->shared_bytes = up(kernel_->shared_bytes, d.align);
      variables_.back()[d.name] = {Space::shared, kernel_->shared_bytes};
      kernel_->shared_bytes += d.size;
      return;
    }
    if (t == ".pragma") return skip_to(";");
    if (t == ".loc") {
      for (next(); see()[0] != '.' && isdigit((unsigned char)see()[0]);) next();
      return;
    }
    instruction();
  }

  void registers() {
    std::string t = next();
    Type type;
    if (t[0] != '.' || !type_of(t.substr(1), type)) refuse("type " + t);
    const uint32_t width = type.bytes == 16 ? 2 : 1;
    do {
      std::string name = next();
      u64 n = 1;
      bool range = take("<");
      if (range) {
        if (!number(next(), n)) refuse("how many registers");
        expect(">");
      }
      (range ? ranges_ : names_).back()[name] = {kernel_->slots, uint32_t(n), width, type};
      kernel_->slots += uint32_t(n) * width;
    } while (take(","));
    expect(";");
  }

  bool find(const std::string& name, uint32_t& slot) const {
    size_t digits = name.size();
    while (digits && isdigit((unsigned char)name[digits - 1])) digits--;
    for (size_t i = names_.size(); i-- > 0;) {
      auto it = names_[i].find(name);
      if (it != names_[i].end()) return slot = it->second.first, true;
      auto r = ranges_[i].find(name.substr(0, digits));
      if (digits < name.size() && r != ranges_[i].end()) {
        u64 n = strtoull(name.c_str() + digits, nullptr, 10);
        if (n < r->second.count) return slot = r->second.first + uint32_t(n) * r->second.width, true;
      }
    }
    return false;
  }
  const Variable* variable(const std::string& name) const {
    for (size_t i = variables_.size(); i-- > 0;) {
      auto it = variables_[i].find(name);
      if (it != variables_[i].end()) return &it->second;
    }
    auto it = module_.find(name);
    return it == module_.end() ? nullptr : &it->second;
  }

  Operand operand() {
    static const std::map<std::string, uint32_t> SPECIAL = {
        {"%tid.x", tid_x}, {"%tid.y", tid_y}, {"%tid.z", tid_z}, {"%ntid.x", ntid_x}, {"%ntid.y", ntid_y}, {"%ntid.z", ntid_z},
        {"%ctaid.x", ctaid_x}, {"%ctaid.y", ctaid_y}, {"%ctaid.z", ctaid_z}, {"%nctaid.x", nctaid_x}, {"%nctaid.y", nctaid_y},
        {"%nctaid.z", nctaid_z}, {"%laneid", laneid}, {"%warpid", warpid}, {"%smid", smid}, {"%nsmid", nsmid}, {"%clock", clock32},
        {"%clock64", clock64}, {"%globaltimer", globaltimer}, {"%lanemask_eq", lanemask_eq}, {"%lanemask_lt", lanemask_lt},
        {"%lanemask_le", lanemask_le}, {"%lanemask_gt", lanemask_gt}, {"%lanemask_ge", lanemask_ge}};
    Operand o;
    if (take("!")) o.negated = true;
    if (take("-")) {
      u64 v;
      if (!number(next(), v)) refuse("a value");
      o.kind = Operand::value;
      o.is = -v;
      return o;
    }
    std::string t = next();
    u64 v;
    auto special = SPECIAL.find(t);
    if (t == "_") return o;
    if (number(t, v)) {
      o.kind = Operand::value;
      o.is = v;
    } else if (special != SPECIAL.end()) {
      o.kind = Operand::special;
      o.slot = special->second;
    } else if (find(t, o.slot)) {
      o.kind = Operand::reg;
    } else if (const Variable* x = variable(t)) {
      o.kind = Operand::value;
      o.is = x->at;
      if (x->space == Space::shared && x->at == ~u64(0)) {
        o.kind = Operand::special;
        o.slot = dynamic_shared;
        o.is = 0;
      }
      last_ = x->space;
    } else {
      at_--;
      refuse("'" + t + "' is nothing that is known");
    }
    if (at_ < tokens_.size() && (see() == "+" || see() == "-") && o.kind != Operand::nothing) {
      bool minus = next() == "-";
      minus ^= take("-");
      if (!number(next(), v)) refuse("an offset");
      o.is += minus ? -v : v;
    }
    return o;
  }
  // The space of the variable that was named last.
  Space last_ = Space::generic;

  void vector(Instruction& i) {
    while (!take("}")) {
      i.several.push_back(operand());
      take(",");
    }
  }

  void instruction();
  void words(Instruction& i, const std::vector<std::string>& w);
};

inline void Parser::words(Instruction& i, const std::vector<std::string>& w) {
  static const std::map<std::string, Op> OPS = {
      {"mov", Op::mov}, {"add", Op::add}, {"sub", Op::sub}, {"mul", Op::mul}, {"mad", Op::mad}, {"div", Op::div}, {"rem", Op::rem},
      {"abs", Op::abs}, {"neg", Op::neg}, {"min", Op::min}, {"max", Op::max}, {"and", Op::and_}, {"or", Op::or_}, {"xor", Op::xor_},
      {"not", Op::not_}, {"cnot", Op::cnot}, {"shl", Op::shl}, {"shr", Op::shr}, {"shf", Op::shf}, {"prmt", Op::prmt}, {"bfi", Op::bfi},
      {"bfe", Op::bfe}, {"lop3", Op::lop3}, {"popc", Op::popc}, {"clz", Op::clz}, {"brev", Op::brev}, {"fma", Op::fma},
      {"sqrt", Op::sqrt}, {"rcp", Op::rcp}, {"rsqrt", Op::rsqrt}, {"ex2", Op::ex2}, {"lg2", Op::lg2}, {"cvt", Op::cvt},
      {"cvta", Op::cvta}, {"setp", Op::setp}, {"selp", Op::selp}, {"ld", Op::ld}, {"st", Op::st}, {"atom", Op::atom}, {"red", Op::red},
      {"bra", Op::bra}, {"ret", Op::ret}, {"exit", Op::ret}, {"trap", Op::trap}, {"call", Op::call}, {"bar", Op::bar},
      {"barrier", Op::bar}, {"vote", Op::vote}, {"shfl", Op::shfl}, {"match", Op::match}, {"redux", Op::redux},
      {"activemask", Op::activemask}, {"fence", Op::fence}, {"membar", Op::fence}, {"nanosleep", Op::nanosleep}};
  static const std::map<std::string, Space> SPACES = {{"global", Space::global}, {"shared", Space::shared}, {"local", Space::local},
                                                      {"param", Space::param}, {"const", Space::constant}};
  static const std::map<std::string, Sub> SUBS = {
      {"eq", Sub::eq}, {"ne", Sub::ne}, {"lt", Sub::lt}, {"le", Sub::le}, {"gt", Sub::gt}, {"ge", Sub::ge}, {"ls", Sub::ls},
      {"hs", Sub::hs}, {"equ", Sub::equ}, {"neu", Sub::neu}, {"ltu", Sub::ltu}, {"leu", Sub::leu}, {"gtu", Sub::gtu},
      {"geu", Sub::geu}, {"num", Sub::num}, {"nan", Sub::nan}, {"add", Sub::add}, {"min", Sub::min}, {"max", Sub::max},
      {"and", Sub::and_}, {"or", Sub::or_}, {"xor", Sub::xor_}, {"exch", Sub::exch}, {"cas", Sub::cas}, {"inc", Sub::inc},
      {"dec", Sub::dec}, {"any", Sub::any}, {"all", Sub::all}, {"ballot", Sub::ballot}, {"idx", Sub::idx}, {"bfly", Sub::bfly},
      {"up", Sub::up}, {"down", Sub::down}, {"l", Sub::left}, {"r", Sub::right}};
  static const std::vector<std::string> KNOWN = {"weak", "gpu", "sys", "gl", "sync", "aligned", "rn", "ftz", "approx", "full",
      "ca", "cg", "cs", "cv", "wb", "wt"};
  auto op = OPS.find(w[0]);
  if (op == OPS.end()) refuse("instruction " + w[0]);
  i.op = op->second;
  for (size_t k = 1; k < w.size(); k++) {
    Type t;
    if (type_of(w[k], t)) {
      if (i.op == Op::vote && w[k] == "pred") continue;
      (i.type.bytes ? i.from : i.type) = t;
    } else if (w[k] == "v2" || w[k] == "v4") {
      // The operands say how many.
    } else if (SPACES.count(w[k])) {
      i.space = SPACES.at(w[k]);
    } else if (w[k] == "lo" && i.op != Op::setp) {
    } else if (w[k] == "hi" && i.op != Op::setp) {
      i.high = true;
    } else if (w[k] == "lo" || w[k] == "hi") {
      i.sub = w[k] == "lo" ? Sub::lo : Sub::hi;
    } else if (w[k] == "wide") {
      i.wide = true;
    } else if (w[k] == "wrap" || w[k] == "clamp") {
      i.wraps = w[k] == "wrap";
    } else if (w[k] == "sat" && i.op == Op::cvt) {
      i.sat = true;
    } else if (w[k] == "rzi") {
      i.toward_zero = true;
    } else if (w[k] == "rm" && i.op == Op::fma && w.back() == "f32") {
      i.down = true;
    } else if (w[k] == "to") {
      i.to = true;
    } else if (w[k] == "warp" && i.op == Op::bar) {
      i.op = Op::warp_bar;
    } else if (w[k] == "relaxed" || w[k] == "volatile") {
      i.strong = true;
    } else if (w[k] == "acquire" || w[k] == "release" || w[k] == "acq_rel" || w[k] == "sc") {
      i.strong = true;
      i.acquires = w[k] != "release";
      i.releases = w[k] != "acquire";
    } else if (w[k] == "cta") {
      i.of_block = true;
    } else if (w[k] == "nc") {
      i.kept = true;
    } else if (w[k] == "uni") {
      if (i.op == Op::vote) i.sub = Sub::uni;
    } else if (SUBS.count(w[k])) {
      (i.sub == Sub::none ? i.sub : i.both) = SUBS.at(w[k]);
    } else {
      bool known = false;
      for (auto& n : KNOWN) known = known || n == w[k];
      if (!known && w[k].find("::") == std::string::npos) refuse("'" + w[k] + "' of " + w[0]);
    }
  }
  if (w[0] == "membar") i.acquires = i.releases = true;
  if ((w[0] == "cvt") && !i.from.bytes) refuse("a conversion from what?");
}

inline void Parser::instruction() {
  Instruction i;
  i.line = tokens_[at_].line;
  if (take("@")) {
    i.unless = take("!");
    if (!find(next(), i.guard)) refuse("no such predicate");
  }
  std::string opcode = next();
  std::vector<std::string> w;
  for (size_t b = 0; b <= opcode.size();) {
    size_t e = opcode.find('.', b);
    if (e == std::string::npos) e = opcode.size();
    w.push_back(opcode.substr(b, e - b));
    b = e + 1;
  }
  words(i, w);
  // For tests of the tests: all that begin so order nothing.
  if (const char* weaken = getenv("STAND_IN_WEAKEN"))
    if (opcode.compare(0, strlen(weaken), weaken) == 0) i.acquires = i.releases = false;
  if (i.op == Op::bra) {
    jumps_.push_back({kernel_->code.size(), next()});
  } else if (i.op == Op::call) {
    // call (result), name, (argument);
    bool gives = take("(");
    if (gives) {
      i.d = operand();
      expect(")");
      expect(",");
    }
    const std::string callee = next();
    if (callee != "malloc" && callee != "free" && callee != "vprintf") refuse("a call of " + callee);
    i.callee = callee == "malloc" ? Callee::malloc : callee == "free" ? Callee::free : Callee::vprintf;
    if (take(",")) {
      expect("(");
      while (!take(")")) {
        if (i.sources < 4) i.s[i.sources++] = operand();
        take(",");
      }
    }
  } else {
    bool first = true;
    const bool gives = !(i.op == Op::st || i.op == Op::red || i.op == Op::bar || i.op == Op::warp_bar || i.op == Op::nanosleep ||
                         i.op == Op::fence);
    while (see() != ";") {
      if (take("[")) {
        last_ = i.space;
        Operand o = operand();
        expect("]");
        // What a call takes and gives has the name of a parameter.
        if (i.space == Space::param && last_ == Space::local) i.of_call = true;
        i.s[i.sources++] = o;
      } else if (take("{")) {
        i.unpacks = first && gives;
        vector(i);
      } else if (first && gives) {
        i.d = operand();
        if (take("|")) i.also = operand();
      } else {
        if (i.sources == 4) refuse("more than four operands");
        i.s[i.sources++] = operand();
      }
      first = false;
      if (!take(",")) break;
    }
  }
  expect(";");
  kernel_->code.push_back(std::move(i));
}

}  // namespace ptx
