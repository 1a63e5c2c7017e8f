// Draws drafts token by token, each after a correction of its logits by the tokens before it
// (drafters/parts/path_heads/correction.py): chains, and trees of the likeliest nodes.
//
// Shape letters: B rows of a batch, K places of a draft, V vocabulary, D hidden size, X rank of the correction.
#include <algorithm>
#include <cmath>
#include <vector>

#include "drawing.h"
#include "gemm.h"
#include "noise.h"
#include "team.h"

/// The previous-token head; or the Markov head, without `token`, `memory` and `reads`, whose memories are embeddings.
struct Correction {
    Matrix token, memory, correction;   // [X, D], [X, X], [V, X]
    const float* embedding;             // [rows, D], or [rows, X] of the Markov head; null if it is
    const BFloat16* embedding_bfloat16; // in bfloat16

    int64_t rank() const { return correction.inputs; }

    /// Reads the embedding of a token into as many numbers as it has.
    void embed(int64_t token, int64_t width, float* into) const {
        int64_t from = std::max<int64_t>(token, 0) * width;
        for (int64_t i = 0; i < width; i++) into[i] = embedding ? embedding[from + i] : number(embedding_bfloat16[from + i]);
    }
};

/// Where the logits of a row's place begin.
static int64_t logits_at(const Correction& model, const Places& given, int64_t row, int64_t place) {
    return (row * given.places + place) * model.correction.outputs;
}

/// The tokens of a few nodes that stand at places of rows, one each, and the memories of the nodes before them.
struct Nodes {
    std::vector<int64_t> rows, places, tokens;
    std::vector<float> before; // [nodes, X]; nothing is read of nodes at place 0

    int64_t count() const { return rows.size(); }
};

/// The memories `[nodes, X]` after some nodes, with which the places after theirs are corrected.
static void remember(const Correction& model, const Places& given, const Nodes& nodes, std::vector<float>& memories) {
    int64_t rank = model.rank(), width = model.token.inputs, count = nodes.count();
    memories.resize(count * rank);
    if (!given.reads) {
        for (int64_t node = 0; node < count; node++) model.embed(nodes.tokens[node], rank, memories.data() + node * rank);
        return;
    }
    std::vector<float> embedded(count * width);
    for (int64_t node = 0; node < count; node++) {
        model.embed(nodes.tokens[node], width, embedded.data() + node * width);
        int64_t read = nodes.rows[node] * (given.places - 1) + nodes.places[node];
        std::copy_n(given.reads + read * rank, rank, memories.data() + node * rank);
    }
    auto add = [&](const Matrix& matrix, const float* inputs, bool is_later) {
        for (int64_t panel = 0; panel < matrix.count(); panel++) {
            Outputs outputs(matrix, panel);
            multiply(matrix, panel, inputs, count, [&](int64_t node, const float* sums) {
                if (is_later && !nodes.places[node]) return;
                for (int64_t i = 0; i < outputs.count; i++) memories[node * rank + outputs.first + i] += sums[i];
            });
        }
    };
    add(model.token, embedded.data(), false);
    bool is_later = std::any_of(nodes.places.begin(), nodes.places.end(), [](int64_t place) { return place > 0; });
    if (is_later) add(model.memory, nodes.before.data(), true);
    for (float& memory : memories) memory /= 1.0f + std::exp(-memory); // SiLU
}

/// Takes the best of scaled logits with the noise of a row's place, which is computed only where it can be the best's.
static void take_noised(
    const Places& given, int64_t row, int64_t place, const Outputs& outputs, const double* scaled, Best& best
) {
    uint64_t start = given.starts[row * given.places + place], bits[N_TILE];
    double highest = -INFINITY;
    bool are_numbers = true, is_any = false;
    for (int64_t i = 0; i < outputs.count; i++) {
        highest = std::max(highest, scaled[i]);
        are_numbers &= scaled[i] == scaled[i];
    }
    double near = NEAR * std::max(1.0, std::abs(best.score));
    uint64_t fewest = best.score > -INFINITY ? fewest_bits(best.score - 2 * near - highest) : 0;
    if (are_numbers && fewest >> 52) return;
    for (int64_t i = 0; i < outputs.count; i++)
        bits[i] = bits_of(start, given.ids ? given.ids[outputs.first + i] : outputs.first + i);
    for (int64_t i = 0; i < outputs.count; i++) is_any |= bits[i] >= fewest;
    if (are_numbers && !is_any) return;
    for (int64_t i = 0; i < outputs.count; i++)
        if (!are_numbers || bits[i] >= fewest) best.take(scaled[i] + noise_of(bits[i]), outputs.first + i);
}

/// Takes the best of a panel's outputs, `corrections` of their logits for a row's place, or none.
static void look_through(
    const Correction& model, const Places& given, int64_t row, int64_t place, const Outputs& outputs,
    const float* corrections, Best& best
) {
    int64_t at = logits_at(model, given, row, place);
    const float* logits = given.logits + at + outputs.first;
    float temperature = given.temperatures[row];
    alignas(64) float corrected[N_TILE];
    alignas(64) double scores[N_TILE];
    for (int64_t i = 0; i < outputs.count; i++) corrected[i] = corrections ? logits[i] + corrections[i] : logits[i];
    if (temperature == 0.0f)
        for (int64_t i = 0; i < outputs.count; i++) scores[i] = corrected[i];
    else {
        for (int64_t i = 0; i < outputs.count; i++) scores[i] = corrected[i] / temperature;
        return take_noised(given, row, place, outputs, scores, best);
    }
    std::fill(scores + outputs.count, scores + N_TILE, -INFINITY);
    // Most panels have nothing better than what was found before; these are gone through lane by lane.
    double largest[LANES], is_no_number[LANES];
    std::fill_n(largest, LANES, -INFINITY);
    std::fill_n(is_no_number, LANES, 0.0);
    for (int64_t i = 0; i < N_TILE; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            largest[lane] = scores[i + lane] > largest[lane] ? scores[i + lane] : largest[lane];
            is_no_number[lane] = scores[i + lane] != scores[i + lane] ? 1.0 : is_no_number[lane];
        }
    bool is_better = false;
    for (int lane = 0; lane < LANES; lane++) is_better |= largest[lane] >= best.score || is_no_number[lane] != 0.0;
    for (int64_t i = 0; is_better && i < outputs.count; i++) best.take(scores[i], outputs.first + i);
}

/// One row's tree with the memories of its nodes.
struct RememberingTree : GrowingTree {
    std::vector<float> memories; // [taken, X]; of nodes that are not expanded anything
};

extern "C" {

/// Writes the tokens `[B, K]` of chains, -2 where the logits are no numbers.
void draw_chains(const Correction* model, const Places* given, int64_t* tokens, int64_t threads) {
    int64_t rows = given->rows, panels = model->correction.count(), vocabulary = model->correction.outputs;
    Nodes nodes;
    std::vector<float> memories;
    std::vector<Best> best(MOST_WORKERS * rows);
    for (int64_t row = 0; row < rows; row++) nodes.rows.push_back(row);
    Team::run(threads, [&](Team& team) {
        for (int64_t place = 0; place < given->places; place++) {
            std::fill(best.begin(), best.end(), Best());
            if (place) {
                nodes.places.assign(rows, place - 1);
                nodes.tokens.resize(rows);
                for (int64_t row = 0; row < rows; row++) nodes.tokens[row] = tokens[row * given->places + place - 1];
                nodes.before.swap(memories);
                remember(*model, *given, nodes, memories);
            }
            team.each(panels, 1, [&](Span some, int worker) {
                for (int64_t panel = some.first; panel < some.last; panel++) {
                    Outputs outputs(model->correction, panel);
                    auto look = [&](int64_t row, const float* sums) {
                        look_through(*model, *given, row, place, outputs, sums, best[worker * rows + row]);
                    };
                    if (place)
                        multiply(model->correction, panel, memories.data(), rows, look);
                    else
                        for (int64_t row = 0; row < rows; row++) look(row, nullptr);
                }
            });
            for (int64_t row = 0; row < rows; row++) {
                Best& found = best[row];
                for (int64_t worker = 1; worker < MOST_WORKERS; worker++) {
                    const Best& other = best[worker * rows + row];
                    if (other.token < vocabulary) found.take(other.score, other.token);
                }
                tokens[row * given->places + place] = std::isfinite(found.score) ? found.token : INVALID;
            }
        }
    });
}

/// Writes the tokens and parents `[B, budget]` of each row's likeliest nodes, best first, -1 after the last one; after a
/// node only the best few tokens are thought of.
void grow_corrected(
    const Correction* model, const Places* given, int64_t few, int64_t budget, int64_t* tokens, int64_t* parents,
    int64_t threads
) {
    int64_t rank = model->rank(), vocabulary = model->correction.outputs, panels = model->correction.count();
    int64_t room = vocabulary + 2 * LANES;
    std::fill_n(tokens, given->rows * budget, ABSENT);
    std::fill_n(parents, given->rows * budget, ABSENT);
    std::vector<RememberingTree> trees(given->rows);
    std::vector<float> scores(given->rows * room), memories;
    Team::run(threads, [&](Team& team) {
        for (int64_t step = 0; step <= budget; step++) {
            Nodes nodes; // after which tokens are looked for
            if (step)
                for (int64_t row = 0; row < given->rows; row++) {
                    RememberingTree& tree = trees[row];
                    if (tree.leaves.empty()) continue;
                    const Leaf& node = tree.take();
                    tokens[row * budget + step - 1] = node.token;
                    parents[row * budget + step - 1] = node.parent;
                    tree.memories.resize(step * rank);
                    if (step == budget || node.token == INVALID || node.place + 1 == given->places) continue;
                    nodes.rows.push_back(row);
                    nodes.places.push_back(node.place);
                    nodes.tokens.push_back(node.token);
                    const float* before = tree.memories.data() + std::max<int64_t>(node.parent, 0) * rank;
                    nodes.before.insert(nodes.before.end(), before, before + rank);
                }
            if (step && !nodes.count()) continue;
            if (step) remember(*model, *given, nodes, memories);
            int64_t count = step ? nodes.count() : given->rows;
            auto row_of = [&](int64_t node) { return step ? nodes.rows[node] : node; };
            auto place_after = [&](int64_t node) { return step ? nodes.places[node] + 1 : 0; };
            team.each(panels, 1, [&](Span some, int) {
                for (int64_t panel = some.first; panel < some.last; panel++) {
                    Outputs outputs(model->correction, panel);
                    auto score = [&](int64_t node, const float* sums) {
                        int64_t row = row_of(node), at = logits_at(*model, *given, row, place_after(node)) + outputs.first;
                        float temperature = given->temperatures[row] ? given->temperatures[row] : 1.0f;
                        bool is_noised = given->noise && given->temperatures[row];
                        float* to = scores.data() + node * room + outputs.first;
                        for (int64_t i = 0; i < outputs.count; i++)
                            to[i] = (given->logits[at + i] + (sums ? sums[i] : 0.0f)) / temperature;
                        for (int64_t i = 0; is_noised && i < outputs.count; i++) to[i] = float(to[i] + given->noise[at + i]);
                    };
                    if (step)
                        multiply(model->correction, panel, memories.data(), count, score);
                    else
                        for (int64_t row = 0; row < count; row++) score(row, nullptr);
                }
            });
            team.each(count, 1, [&](Span some, int) {
                for (int64_t node = some.first; node < some.last; node++) {
                    RememberingTree& tree = trees[row_of(node)];
                    if (step) std::copy_n(memories.data() + node * rank, rank, tree.memories.data() + (step - 1) * rank);
                    tree.add_best(scores.data() + node * room, vocabulary, few, step - 1, place_after(node));
                }
            });
        }
    });
}
}
