// Draws tokens from logits as sampling/distribution.py and sampling/noise.py do: the largest of logit / temperature plus
// Gumbel noise, of the tokens that top-k, top-p and min-p leave, each test in the same float32 numbers.
//
// Nothing is sorted, and no noise is computed that cannot win. Whether a token is inside the nucleus follows from the
// probability of the tokens before it, so only the winner's place is looked up, and if it is outside the search goes on among
// the tokens before it. Sums and logarithms are rounded otherwise than torch does. Where that could change the token, which
// happens in a few of 10,000 draws with top-p, none is told.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "noise.h"
#include "team.h"

/// How a row's tokens are chosen.
struct Choice {
    int64_t seed, top_k;              // 0 keeps all
    double top_p;                     // 1 keeps all
    float temperature, min_log_ratio; // 0 takes the likeliest token; -inf keeps all
};

constexpr int64_t INVALID = -2, UNDECIDED = -3;  // tokens: of logits that are no numbers; that roundings could change
constexpr int64_t ABSENT = -1;                   // padding of tokens
constexpr int64_t CHUNK = 256;                   // tokens whose highest logit is remembered
constexpr double NEAR_SHARES = 1e-4;             // and sums of probabilities
constexpr double FAR = 32.0;                     // tokens so far below the likeliest add less than a billionth to them

/// A token and its scaled logit. Tokens are in the order in which a nucleus takes them.
struct Scaled {
    float logit;
    int64_t token;

    bool is_before(const Scaled& other) const {
        return logit > other.logit || (logit == other.logit && token < other.token);
    }
};

/// Logits of one position.
class Position {
  public:
    Position(const float* logits, int64_t vocabulary, const Choice& choice, int64_t position)
        : logits(logits), vocabulary(vocabulary), choice(choice),
          start(mixed(mixed(choice.seed + GOLDEN) + (uint64_t(position) + 1) * GOLDEN)) {}

    int64_t draw() {
        bool are_numbers = look_through();
        float largest = *std::max_element(highest.begin(), highest.end());
        if (!are_numbers || !std::isfinite(largest)) return INVALID;
        int64_t chunk = std::find(highest.begin(), highest.end(), largest) - highest.begin();
        likeliest.token = std::find(logits + chunk * CHUNK, logits + vocabulary, largest) - logits;
        if (choice.temperature == 0.0f) return likeliest.token;
        for (float& logit : highest) logit /= choice.temperature;
        likeliest.logit = largest / choice.temperature;
        return std::isfinite(likeliest.logit) ? draw_noised() : UNDECIDED;
    }

    /// The probability of the likeliest token, if no token is left out; NaN where there is none.
    double largest_probability() {
        bool are_numbers = look_through();
        float largest = *std::max_element(highest.begin(), highest.end());
        if (!are_numbers || !std::isfinite(largest)) return NAN;
        for (float& logit : highest) logit /= choice.temperature;
        likeliest.logit = largest / choice.temperature;
        return 1.0 / weight(-INFINITY, [](Vector logit, int64_t) { return logit == logit; });
    }

    /// Writes the `count` likeliest tokens, the best first, and their logits; none after the last that may be chosen, and none
    /// where logits are no numbers.
    void likeliest_tokens(int64_t count, int64_t* tokens, float* their_logits) {
        std::vector<Scaled> best;
        if (look_through()) {
            std::vector<float> sorted = highest;
            int64_t kept = std::min(count, (int64_t)sorted.size());
            std::nth_element(sorted.begin(), sorted.begin() + kept - 1, sorted.end(), std::greater<>());
            float least = kept < count ? -INFINITY : sorted[kept - 1]; // as many chunks have one that is as likely
            for (int64_t chunk = 0; chunk < (int64_t)highest.size(); chunk++)
                for (int64_t i = chunk * CHUNK; highest[chunk] >= least && i < end_of(chunk); i++)
                    if (logits[i] >= least && logits[i] > -INFINITY) best.push_back({logits[i], i});
        }
        auto is_before = [](const Scaled& one, const Scaled& other) { return one.is_before(other); };
        int64_t found = std::min(count, (int64_t)best.size());
        std::partial_sort(best.begin(), best.begin() + found, best.end(), is_before);
        for (int64_t i = 0; i < found; i++) tokens[i] = best[i].token, their_logits[i] = best[i].logit;
    }

  private:
    const float* logits;
    int64_t vocabulary;
    const Choice& choice;
    uint64_t start; // of the position's random numbers
    std::vector<float> highest; // of each chunk; scaled, once they are
    Scaled likeliest;

    int64_t end_of(int64_t chunk) const { return std::min((chunk + 1) * CHUNK, vocabulary); }

    float scaled(int64_t token) const { return logits[token] / choice.temperature; }

    /// Of as many tokens as there are lanes; -inf after the last one.
    Vector scaled_from(int64_t first) const {
        if (first + LANES <= vocabulary) return load(logits + first) / choice.temperature;
        float rest[LANES];
        std::fill(std::copy(logits + first, logits + vocabulary, rest), rest + LANES, -INFINITY);
        return load(rest) / choice.temperature;
    }

    /// Sets the highest logit of each chunk. Returns whether all logits are numbers.
    bool look_through() {
        highest.clear();
        Integers is_none = {};
        bool is_none_of_rest = false;
        for (int64_t first = 0; first < vocabulary; first += CHUNK) {
            constexpr int AT_ONCE = 4; // maxima that do not wait for each other
            Vector highest_of[AT_ONCE];
            std::fill(highest_of, highest_of + AT_ONCE, splat(-INFINITY));
            auto look_at = [&](int64_t token, Vector& most) {
                Vector logit = load(logits + token);
                is_none |= logit != logit;
                most = logit > most ? logit : most;
            };
            int64_t end = std::min(first + CHUNK, vocabulary), i = first;
            for (; i + AT_ONCE * LANES <= end; i += AT_ONCE * LANES)
                for (int each = 0; each < AT_ONCE; each++) look_at(i + each * LANES, highest_of[each]);
            for (; i + LANES <= end; i += LANES) look_at(i, highest_of[0]);
            Vector most = highest_of[0];
            for (Vector other : highest_of) most = other > most ? other : most;
            float largest = most[0];
            for (int lane = 1; lane < LANES; lane++) largest = std::max(largest, most[lane]);
            for (; i < end; i++) {
                is_none_of_rest |= logits[i] != logits[i];
                largest = std::max(largest, logits[i]);
            }
            highest.push_back(largest);
        }
        for (int lane = 0; lane < LANES; lane++) is_none_of_rest |= is_none[lane] != 0;
        return !is_none_of_rest;
    }

    /// How likely some tokens are together, against the likeliest: of those at least `least`, whose vectors of scaled logits
    /// and first tokens pass a test.
    template <class Test> double weight(float least, Test is_in) const {
        double total = 0.0;
        for (int64_t chunk = 0; chunk < (int64_t)highest.size(); chunk++) {
            if (highest[chunk] < least || highest[chunk] < likeliest.logit - FAR) continue;
            Vector sum = {};
            for (int64_t i = chunk * CHUNK; i < end_of(chunk); i += LANES) {
                Vector logit = scaled_from(i);
                sum += is_in(logit, i) ? exponential(logit - likeliest.logit) : Vector{};
            }
            for (int lane = 0; lane < LANES; lane++) total += sum[lane];
        }
        return total;
    }

    double weight_before(const Scaled& one) const {
        Integers lanes;
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
        return weight(one.logit, [&](Vector logit, int64_t first) {
            return (logit > one.logit) | ((logit == one.logit) & (lanes < int32_t(one.token - first)));
        });
    }

    /// The scaled logit of the k-th likeliest token.
    float kth() const {
        if (!choice.top_k || choice.top_k >= vocabulary) return -INFINITY;
        float least = -INFINITY;
        auto lower_to_kth = [&](std::vector<float>& values) {
            std::nth_element(values.begin(), values.begin() + choice.top_k - 1, values.end(), std::greater<float>());
            least = values[choice.top_k - 1];
        };
        std::vector<float> values = highest;
        if (choice.top_k <= (int64_t)values.size()) lower_to_kth(values); // so many chunks have a token that is no less
        values.clear();
        for (int64_t chunk = 0; chunk < (int64_t)highest.size(); chunk++)
            for (int64_t i = chunk * CHUNK; highest[chunk] >= least && i < end_of(chunk); i++)
                if (scaled(i) >= least) values.push_back(scaled(i));
        lower_to_kth(values);
        return least;
    }

    int64_t draw_noised() const {
        bool has_nucleus = choice.top_p < 1.0;
        float least = kth();
        double lowest = std::max(least, likeliest.logit + choice.min_log_ratio), total = 0.0;
        // torch rounds the logarithm of the sum to float32, which changes shares the more the larger logits are.
        double near_shares = NEAR_SHARES + std::abs(likeliest.logit) * 0x1p-22;
        if (has_nucleus) {
            total = weight(least, [&](Vector logit, int64_t) { return logit >= least; });
            // Tokens below a place are together no likelier than this: all are outside.
            double outside = (1 - choice.top_p - 2 * near_shares) * total / vocabulary;
            if (outside > 0) lowest = std::max(lowest, likeliest.logit + std::log(outside));
        }
        for (Scaled end = {-INFINITY, vocabulary};;) {
            Scaled best = best_before(end, lowest);
            if (best.token == UNDECIDED || !has_nucleus) return best.token;
            double before = weight_before(best), size = choice.top_p * total, near = near_shares * total;
            if (before == 0.0 || before < size - near) return best.token;
            if (before < size + near) return UNDECIDED;
            end = best;
        }
    }

    /// The best of the tokens before a place whose scaled logit is at least `lowest`.
    Scaled best_before(const Scaled& end, double lowest) const {
        Scaled best = {-INFINITY, UNDECIDED};
        double score = -INFINITY, second = -INFINITY;
        auto take = [&](int64_t token, uint64_t bits) {
            Scaled one = {scaled(token), token};
            if (one.logit < lowest || token == best.token || !one.is_before(end)) return;
            if (one.logit + MOST_NOISE < score) return;
            double found = one.logit + noise_of(bits);
            second = std::max(second, std::min(found, score));
            if (found > score) score = found, best = one;
        };
        auto near = [&] { return NEAR * std::max(1.0, std::abs(score)); };
        take(likeliest.token, bits_of(start, likeliest.token));
        uint64_t bits[CHUNK];
        for (int64_t chunk = 0; chunk < (int64_t)highest.size(); chunk++) {
            if (highest[chunk] < lowest) continue;
            uint64_t fewest = fewest_bits(score - 2 * near() - highest[chunk]), word = start + chunk * CHUNK * GOLDEN;
            if (fewest >> 52) continue;
            bool is_any = false;
            for (int64_t i = 0; i < CHUNK; i++) bits[i] = mixed(word + uint64_t(i + 1) * GOLDEN) >> 12;
            for (int64_t i = 0; i < CHUNK; i++) is_any |= bits[i] >= fewest;
            for (int64_t i = 0; is_any && i < end_of(chunk) - chunk * CHUNK; i++)
                if (bits[i] >= fewest) take(chunk * CHUNK + i, bits[i]);
        }
        return score - second > near() ? best : Scaled{-INFINITY, UNDECIDED};
    }
};

/// Visits all places of all rows, on several threads.
template <class Visit> static void each_place(int64_t rows, int64_t places, int64_t threads, Visit visit) {
    int64_t count = rows * places;
    Team::run(std::min(threads, count), [&](Team& team) {
        team.each(count, 1, [&](Span some, int) {
            for (int64_t i = some.first; i < some.last; i++) visit(i);
        });
    });
}

extern "C" {

/// Writes the tokens `[rows, places]` that rows draw at positions `[rows, places]` from logits, whose rows and places lie so
/// many numbers apart: -2 where logits are no numbers, -1 at positions below 0. Returns 0; 1 if roundings could change one.
int64_t draw_tokens(
    const float* logits, int64_t row_stride, int64_t place_stride, int64_t vocabulary, const Choice* choices,
    const int64_t* positions, int64_t rows, int64_t places, int64_t* tokens, int64_t threads
) {
    each_place(rows, places, threads, [&](int64_t i) {
        const float* from = logits + i / places * row_stride + i % places * place_stride;
        tokens[i] = positions[i] < 0 ? ABSENT : Position(from, vocabulary, choices[i / places], positions[i]).draw();
    });
    int64_t* end = tokens + rows * places;
    return std::find(tokens, end, UNDECIDED) != end;
}

/// Writes the probabilities `[rows, places]` of the likeliest tokens at the temperatures of the rows.
void largest_probabilities(
    const float* logits, int64_t row_stride, int64_t place_stride, int64_t vocabulary, const float* temperatures,
    int64_t rows, int64_t places, double* largest, int64_t threads
) {
    each_place(rows, places, threads, [&](int64_t i) {
        const float* from = logits + i / places * row_stride + i % places * place_stride;
        const Choice all = {0, 0, 1.0, temperatures[i / places], -INFINITY};
        largest[i] = Position(from, vocabulary, all, 0).largest_probability();
    });
}

/// Writes the `count` likeliest tokens `[rows, places, count]` and their logits, see `Position::likeliest_tokens`; -1 and
/// -inf where the token `[rows, places]` that was read is -1.
void likeliest_tokens(
    const float* logits, int64_t row_stride, int64_t place_stride, int64_t vocabulary, const int64_t* read, int64_t rows,
    int64_t places, int64_t count, int64_t* tokens, float* their_logits, int64_t threads
) {
    const Choice greedy = {0, 0, 1.0, 0.0f, -INFINITY};
    each_place(rows, places, threads, [&](int64_t i) {
        const float* from = logits + i / places * row_stride + i % places * place_stride;
        std::fill_n(tokens + i * count, count, ABSENT);
        std::fill_n(their_logits + i * count, count, -INFINITY);
        if (read[i] == ABSENT) return;
        Position(from, vocabulary, greedy, 0).likeliest_tokens(count, tokens + i * count, their_logits + i * count);
    });
}
}
