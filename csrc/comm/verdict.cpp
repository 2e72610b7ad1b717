#include "comm/verdict.h"

#include <c10/util/StringUtil.h>

#include <sstream>

namespace shardtensor::comm::desync {

namespace {

constexpr char kPart = '\x1f', kItem = '\x1e', kNumber = ',';

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, at);) {
    out.push_back(part);
  }
  return out;
}

std::vector<int64_t> numbers(const std::string& text) {
  std::vector<int64_t> out;
  for (const auto& number : split(text, kNumber)) {
    out.push_back(std::stoll(number));
  }
  return out;
}

std::string both(const Report& mine, const Report& other) {
  return c10::str("Rank ", mine.rank, ": ", mine.text, "; rank ", other.rank, ": ", other.text);
}

// Whether this rank failed in the same op, at the same place among the group's collectives.
bool failed_alike(const Report& other, const std::deque<Report>& own, const std::string& group) {
  const auto at = [&](const Report& r) {
    const auto* progress = r.progress(group);
    return progress ? progress->number : 0;
  };
  return std::any_of(
      own.begin(), own.end(), [&](const Report& mine) { return mine.text == other.text && at(mine) == at(other); });
}

} // namespace

const GroupProgress* Report::progress(const std::string& name) const {
  const auto it = groups.find(name);
  return it == groups.end() ? nullptr : &it->second;
}

std::string Report::str() const {
  return c10::str("rank ", rank, ended() ? " has " : " failed in ", text, error.empty() ? "" : ": ", error);
}

std::string one_line(std::string text) {
  if (const auto trace = text.find("\nException raised from"); trace != std::string::npos) {
    text.resize(trace);
  }
  for (auto& c : text) {
    c = c == kPart || c == kItem || c == '\n' ? ' ' : c;
  }
  constexpr size_t kMost = 1000;
  if (text.size() > kMost) {
    text.resize(kMost);
    text += "...";
  }
  return text;
}

std::string write_report(const Report& r) {
  std::ostringstream out;
  const auto put = [&](char after, const auto&... values) { ((out << values << after), ...); };
  const auto list = [](const std::vector<int64_t>& values) { return c10::Join(std::string(1, kNumber), values); };
  put(kPart, static_cast<int>(r.state), r.rank, one_line(r.text), one_line(r.error), r.group, r.number, r.facts, r.drawn, r.nth,
      list(r.absent));
  for (const auto& [name, p] : r.groups) {
    put(kItem, name, p.number, p.broken, list(p.skipped), list(p.back), p.mark.number, p.mark.history, p.mark.equal_pieces);
    out << kPart;
  }
  return out.str();
}

Report read_report(const std::string& text) {
  const auto parts = split(text, kPart);
  Report out{static_cast<Report::ReportState>(std::stoi(parts.at(0))), std::stoll(parts.at(1)), parts.at(2), parts.at(3)};
  out.group = parts.at(4);
  out.number = std::stoll(parts.at(5));
  out.facts = std::stoull(parts.at(6));
  out.drawn = std::stoull(parts.at(7));
  out.nth = std::stoll(parts.at(8));
  out.absent = numbers(parts.at(9));
  for (size_t i = 10; i < parts.size(); ++i) {
    const auto items = split(parts[i], kItem);
    out.groups[items.at(0)] = {
        std::stoll(items.at(1)),
        items.at(2) == "1",
        numbers(items.at(3)),
        numbers(items.at(4)),
        {std::stoll(items.at(5)), std::stoull(items.at(6)), std::stoull(items.at(7))}};
  }
  return out;
}

std::string differ(const Report& mine, const Report& first) {
  return mine.facts == first.facts ? "" : "the ranks make different collectives. " + both(mine, first);
}

std::string wait_for_each_other(const Report& mine, const Report& other, std::optional<int64_t> begun) {
  const bool waits = other.state == Report::ReportState::InCollective || other.state == Report::ReportState::InBarrier;
  const auto* there = other.progress(mine.group);
  const bool it_has_begun = there && there->number >= mine.number;
  const bool needs_me = begun && *begun < other.number;
  return waits && !it_has_begun && needs_me ? "the ranks wait for each other. " + both(mine, other) : "";
}

Verdict verdict(
    const Report& mine,
    c10::IntArrayRef needed,
    const Report& other,
    const std::deque<Report>& own,
    Clock::time_point now,
    std::chrono::milliseconds grace) {
  const bool by_messages = mine.group.empty();
  if (other.rank == mine.rank || !contains(needed, other.rank) || (other.ended() && by_messages)) { // it may have sent before
    return Verdict::MayCome;
  }
  const auto* there = by_messages ? nullptr : other.progress(mine.group);
  if (there && (there->broken || contains(there->skipped, mine.number))) {
    return Verdict::InVain;
  }
  if (there && there->number >= mine.number) {
    return Verdict::MayCome;
  }
  if (other.ended()) {
    return Verdict::InVain;
  }
  const bool alike = !by_messages && failed_alike(other, own, mine.group);
  return alike || now - std::max(other.since, mine.since) < grace ? Verdict::MayCome : Verdict::ComesIfBack;
}

bool is_back(const Report& failure, const Report& now, const std::string& group) {
  const auto* there = now.progress(group);
  return failure.nth <= now.nth && (!contains(now.absent, failure.nth) || (there && contains(there->back, failure.nth)));
}

MarkComparison compare(const Mark& mine, const Mark& theirs) {
  const bool as_many = ((mine.equal_pieces ^ theirs.equal_pieces) & 0xffff) == 0;
  return {mine.history != theirs.history, as_many && mine.equal_pieces != theirs.equal_pieces};
}

std::vector<int64_t> silent(int64_t me, c10::IntArrayRef ranks, const std::deque<Report>& news, Clock::time_point since) {
  std::vector<int64_t> out;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(out), [&](int64_t rank) {
    const auto gives_a_sign = [&](const Report& f) { return f.rank == rank && (f.ended() || f.since >= since); };
    return rank != me && std::none_of(news.begin(), news.end(), gives_a_sign);
  });
  return out;
}

const Report* first_ended(c10::IntArrayRef ranks, const std::deque<Report>& news) {
  const auto it = std::find_if(news.begin(), news.end(), [&](const Report& f) { return f.ended() && contains(ranks, f.rank); });
  return it == news.end() ? nullptr : &*it;
}

} // namespace shardtensor::comm::desync
