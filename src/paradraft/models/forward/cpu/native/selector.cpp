// Draws drafts token by token, each the best of the likeliest tokens of its place by scores that depend on the token
// before (drafters/parts/path_heads/selector.py): chains, and trees of the likeliest nodes.
//
// Shape letters: B rows of a batch, K places of a draft, V vocabulary, X rank, C likeliest tokens.
#include "drawing.h"
#include "team.h"

struct Selector {
    int64_t rank, vocabulary, few;   // X, V, C
    const BFloat16 *before, *chosen; // [rows, X] of the token before, [V, X] of a token that may be chosen
};

/// The likeliest tokens `[C]` of a row's place and their logits; -1 after the last one, and where logits are no numbers.
struct Likeliest {
    const int64_t* ids;
    const float* logits;
    int64_t count = 0;

    Likeliest(const Selector& model, const Places& given, const int64_t* all, int64_t row, int64_t place) {
        int64_t first = (row * given.places + place) * model.few;
        ids = all + first;
        logits = given.logits + first;
        while (count < model.few && ids[count] != ABSENT) count++;
    }
};

/// Writes the scores of a place's likeliest tokens after a token, before any temperature.
static void score(
    const Selector& model, const Places& given, const Likeliest& likeliest, int64_t row, int64_t place, int64_t token,
    float* scores
) {
    const float* state = given.reads + (row * given.places + place) * model.rank;
    const BFloat16* before = model.before + std::max<int64_t>(token, 0) * model.rank;
    std::vector<float> gated(model.rank);
    for (int64_t i = 0; i < model.rank; i++) gated[i] = number(before[i]) * state[i];
    for (int64_t c = 0; c < likeliest.count; c++) {
        const BFloat16* chosen = model.chosen + likeliest.ids[c] * model.rank;
        float total = 0.0f;
        for (int64_t i = 0; i < model.rank; i++) total += gated[i] * number(chosen[i]);
        scores[c] = likeliest.logits[c] + total;
    }
}

/// The noise of the likeliest tokens of a row's place; null for none.
static const double* noise_at(const Selector& model, const Places& given, int64_t row, int64_t place) {
    if (!given.noise || !given.temperatures[row]) return nullptr;
    return given.noise + (row * given.places + place) * model.few;
}

extern "C" {

/// Writes the tokens `[B, K]` of chains after anchors `[B]`, -2 where the logits are no numbers.
///
/// Logits and noise of `given` are those of the likeliest tokens, `likeliest` are these tokens, `[B, K, C]` all.
void select_chains(
    const Selector* model, const Places* given, const int64_t* likeliest, const int64_t* anchors, int64_t* tokens,
    int64_t threads
) {
    Team::run(threads, [&](Team& team) {
        team.each(given->rows, 1, [&](Span some, int) {
            std::vector<float> scores(model->few);
            for (int64_t row = some.first; row < some.last; row++) {
                int64_t token = anchors[row];
                for (int64_t place = 0; place < given->places; place++) {
                    Likeliest few(*model, *given, likeliest, row, place);
                    const double* noise = noise_at(*model, *given, row, place);
                    score(*model, *given, few, row, place, token, scores.data());
                    Best best;
                    for (int64_t c = 0; c < few.count; c++) {
                        float temperature = noise ? given->temperatures[row] : 1.0f;
                        best.take(double(scores[c] / temperature) + (noise ? noise[c] : 0.0), few.ids[c]);
                    }
                    token = std::isfinite(best.score) ? best.token : INVALID;
                    tokens[row * given->places + place] = token;
                }
            }
        });
    });
}

/// Writes the tokens and parents `[B, budget]` of each row's likeliest nodes, best first, -1 after the last one; after a
/// node only the best `most` tokens are thought of. See `select_chains`.
void grow_selected(
    const Selector* model, const Places* given, const int64_t* likeliest, const int64_t* anchors, int64_t most,
    int64_t budget, int64_t* tokens, int64_t* parents, int64_t threads
) {
    std::fill_n(tokens, given->rows * budget, ABSENT);
    std::fill_n(parents, given->rows * budget, ABSENT);
    Team::run(threads, [&](Team& team) {
        team.each(given->rows, 1, [&](Span some, int) {
            std::vector<float> scores(model->few + 2 * LANES);
            for (int64_t row = some.first; row < some.last; row++) {
                GrowingTree tree;
                auto add = [&](int64_t parent, int64_t place, int64_t token) {
                    Likeliest few(*model, *given, likeliest, row, place);
                    const double* noise = noise_at(*model, *given, row, place);
                    float temperature = given->temperatures[row] ? given->temperatures[row] : 1.0f;
                    score(*model, *given, few, row, place, token, scores.data());
                    for (int64_t c = 0; c < few.count; c++)
                        scores[c] = float(scores[c] / temperature + (noise ? noise[c] : 0.0));
                    tree.add_best(scores.data(), few.count, std::min(most, few.count), parent, place, few.ids);
                };
                add(-1, 0, anchors[row]);
                for (int64_t step = 0; step < budget && !tree.leaves.empty(); step++) {
                    Leaf node = tree.take();
                    tokens[row * budget + step] = node.token;
                    parents[row * budget + step] = node.parent;
                    if (node.token != INVALID && node.place + 1 < given->places) add(step, node.place + 1, node.token);
                }
            }
        });
    });
}
}
