// One forward pass of a Llama- or Qwen-type model on a CPU: float32 arithmetic, weights and cache in float32 or
// bfloat16. Where the CPU multiplies bfloat16 numbers by themselves, what a bfloat16 model multiplies is rounded to them, as the
// model's own code does, and added up in float32.
//
// A pass is a sequence of steps, each of which a team of threads shares (team.h). A token's result does not depend on how
// many tokens are read with it, nor on the number of threads: it is the same to the last bit in every pass.
//
// Rows may have different numbers of tokens. Absent ones fill up the arguments and are not computed: between its inputs and
// its outputs a pass knows only the tokens that are there, row after row.
//
// Shape letters as in causal_lm.py: B rows of a batch, N tokens of each, R rows whose logits are wanted; C tokens there are.

#include <algorithm>
#include <vector>

#include "attention.h"
#include "batch.h"
#include "changed.h"
#include "products.h"

struct Layer {
    Matrix qkv[3]; // of queries, keys and values in this order; the first may have those of others too, which are empty then
    Matrix output, gate, up, down;
    const float *norm, *post_attention_norm;
    const float *query_norm, *key_norm; // null if there are none
};

struct Model {
    int64_t hidden_size, intermediate, heads, kv_heads, head_size, layers, vocabulary;
    int64_t is_bfloat16; // what the model computes in, and the cache holds; else float32
    float epsilon, scale;
    const float *cosines, *sines; // [positions, head_size / 2]
    const float* final_norm;
    const float* embedding;             // null if it is
    const BFloat16* embedding_bfloat16; // in bfloat16
    const Matrix* embedding_integers;   // whole numbers
    Matrix head;
    const Layer* layer;
    const float* added; // [added_rows, hidden_size], the embeddings of the ids from `vocabulary` on
    int64_t added_rows;
    const Change* changes;
    int64_t change_count;
    // Whether nothing is rounded but float32 arithmetic, whatever the weights are: what other passes are compared with. The
    // cache is float32 then.
    int64_t is_exact;
};

constexpr int64_t FEW_TOKENS = 16; // whose norms take no longer than it takes to share them out

/// Tokens that a step computes, row after row.
struct Chosen {
    std::vector<int64_t> tokens; // which of the tokens that there are
    std::vector<int64_t> first;  // [B + 1] where each row's begin
    std::vector<int64_t> groups; // [B + 1] where each row's groups of queries begin; see `attend_all`

    int64_t count() const { return tokens.size(); }
};

/// What a pass writes in between; kept from pass to pass.
struct Scratch {
    std::vector<float> hidden, last_hidden, projected, gates, scores;
    std::vector<float> normed, attended, intermediate, wanted; // what products read, as float or as bfloat16
    std::vector<int32_t> seen;
    std::vector<int64_t> depths, counts;
    std::vector<int64_t> places;           // [C] where in [B, N] each token is
    std::vector<int64_t> numbers;          // [B, N] which token is there; -1 for none
    std::vector<int64_t> outputs, missing; // where in [B, R] the wanted logits go, and where there is no token
    Chosen all, last;                      // tokens of a layer, and of the last one
    Changed changed;
    Rounding rounding;
};

/// Whether all indices are within what they index; a wrong one would be read or written as it is.
static bool is_sound(const Model& model, const Batch& batch) {
    for (int64_t row = 0; row < batch.rows; row++) {
        if (batch.lengths[row] < 0) return false;
        for (int64_t token = 0; token < batch.tokens; token++) {
            int64_t at = row * batch.tokens + token;
            if (batch.ids[at] >= model.vocabulary + model.added_rows || batch.parents[at] >= token) return false;
        }
        for (int64_t i = row * batch.wanted; i < (row + 1) * batch.wanted; i++)
            if (batch.places[i] < -1 || batch.places[i] >= batch.tokens) return false;
    }
    return true;
}

/// Finds the tokens that there are, and those whose logits are wanted. What follows an absent token is absent.
static void choose(const Batch& batch, Scratch& scratch) {
    auto &tokens = scratch.all.tokens, &first = scratch.all.first;
    auto &last_tokens = scratch.last.tokens, &last_first = scratch.last.first;
    for (auto* list : {&tokens, &first, &last_tokens, &last_first, &scratch.places, &scratch.outputs, &scratch.missing}) list->clear();
    scratch.numbers.assign(batch.rows * batch.tokens, -1);
    for (int64_t row = 0; row < batch.rows; row++) {
        first.push_back(tokens.size());
        last_first.push_back(last_tokens.size());
        for (int64_t at = row * batch.tokens; at < (row + 1) * batch.tokens; at++) {
            int64_t parent = batch.parents[at];
            bool has_parent = parent < 0 || scratch.numbers[row * batch.tokens + parent] >= 0;
            if (batch.ids[at] < 0 || !has_parent) continue;
            scratch.numbers[at] = tokens.size();
            tokens.push_back(tokens.size());
            scratch.places.push_back(at);
        }
        for (int64_t to = row * batch.wanted; to < (row + 1) * batch.wanted; to++) {
            if (batch.places[to] < 0) continue;
            int64_t number = scratch.numbers[row * batch.tokens + batch.places[to]];
            if (number >= 0) last_tokens.push_back(number);
            (number >= 0 ? scratch.outputs : scratch.missing).push_back(to);
        }
    }
    first.push_back(tokens.size());
    last_first.push_back(last_tokens.size());
}

/// Writes the keys and values of a thread's share of the tokens into the cache, and turns its queries.
template <class Stored>
static void place(
    const Model& model, const Layer& layer, const Batch& batch, int64_t number, const Scratch& scratch, float* projected,
    Span share
) {
    int64_t size = model.head_size, half = size / 2, heads = model.heads, kv_heads = model.kv_heads;
    for (int64_t at = share.first; at < share.last; at++) {
        int64_t row = scratch.places[at] / batch.tokens, token = scratch.places[at] % batch.tokens;
        int64_t position = within(batch, row, scratch.depths[at]);
        const float *cosines = model.cosines + position * half, *sines = model.sines + position * half;
        float* head = projected + at * (heads + 2 * kv_heads) * size;
        for (int64_t h = 0; h < heads + kv_heads; h++, head += size) {
            const float* norm = h < heads ? layer.query_norm : layer.key_norm;
            if (norm) rms_norm(head, norm, size, model.epsilon, head);
            apply_rope(head, cosines, sines, size);
        }
        int64_t offset = (row * batch.slots + within(batch, row, token)) * kv_heads * size;
        Stored *key = (Stored*)batch.keys[number] + offset, *value = (Stored*)batch.values[number] + offset;
        for (int64_t i = 0; i < kv_heads * size; i++) {
            key[i] = stored<Stored>(head[i - kv_heads * size]);
            value[i] = stored<Stored>(head[i]);
        }
    }
}

/// Numbers that the scores of one query need.
static int64_t room_of(const Batch& batch) { return batch.slots + batch.tokens + 2 * LANES; }

/// Cuts the queries of each row and head of keys into groups that are attended to together; sets where a row's groups begin.
static void group(const Model& model, Chosen& chosen) {
    chosen.groups.assign(1, 0);
    for (size_t row = 0; row + 1 < chosen.first.size(); row++) {
        int64_t queries = (chosen.first[row + 1] - chosen.first[row]) * (model.heads / model.kv_heads);
        chosen.groups.push_back(chosen.groups.back() + model.kv_heads * ((queries + Q_TILE - 1) / Q_TILE));
    }
}

/// Attention of a thread's share of all groups of queries of the chosen tokens.
template <class Stored, class Input>
static void attend_all(
    const Model& model, const Batch& batch, int64_t number, const Seen& seen, const Chosen& chosen,
    const float* projected, Input* attended, float* scores, Span share
) {
    int64_t size = model.head_size, heads = model.heads, kv_heads = model.kv_heads, sharing = heads / kv_heads;
    int64_t room = room_of(batch), row = 0;
    for (int64_t at = share.first; at < share.last; at++) {
        while (chosen.groups[row + 1] <= at) row++;
        int64_t groups = (chosen.groups[row + 1] - chosen.groups[row]) / kv_heads, which = at - chosen.groups[row];
        int64_t kv_head = which / groups, first = chosen.first[row];
        Span some((chosen.first[row + 1] - first) * sharing, which % groups, groups);
        Query<Input> queries[Q_TILE];
        for (int64_t i = 0; i < some.last - some.first; i++) {
            int64_t query = some.first + i, to = first + query / sharing;
            int64_t from = chosen.tokens[to], h = kv_head * sharing + query % sharing;
            queries[i] = {
                projected + (from * (heads + 2 * kv_heads) + h) * size, seen.slots + from * batch.tokens,
                seen.counts[from], scores + i * room, attended + (to * heads + h) * size,
            };
        }
        int64_t offset = (row * batch.slots * kv_heads + kv_head) * size;
        attend(
            some.last - some.first, queries, (const Stored*)batch.keys[number] + offset, (const Stored*)batch.values[number] + offset,
            kv_heads * size, kept_of(batch, row), size, model.scale
        );
    }
}

/// Numbers of groups as floats, those of one output.
static void copy_numbers(int64_t kind, int64_t groups, int64_t group, const void* numbers, const int8_t* of_groups, float* to) {
    for (int64_t i = 0; i < groups; i++) {
        int64_t at = kind == PRODUCTS ? i * group / SUPERBLOCK : i;
        uint16_t half;
        if (kind == FLOATS) to[i] = ((const float*)numbers)[at];
        else memcpy(&half, (const uint16_t*)numbers + at, 2), to[i] = half_number(half);
        if (kind == PRODUCTS) to[i] *= of_groups[i];
    }
}

void copy_output(const Matrix& matrix, int64_t output, float* to) {
    const Grouping& grouping = matrix.grouping;
    int64_t groups = groups_of(grouping, matrix.inputs), group = grouping.group ? grouping.group : matrix.inputs;
    thread_local std::vector<int8_t> values, scale_numbers, offset_numbers;
    thread_local std::vector<float> scales, offsets, all_scales, all_offsets; // of those as they are stored, which are not larger
    Weights own = {
        grown(values, matrix.inputs), grown(scales, groups), grown(offsets, groups), grown(scale_numbers, groups),
        grown(offset_numbers, groups),
    };
    unpack_output((const uint8_t*)matrix.panels, matrix.inputs, grouping, output, own);
    float *scale = grown(all_scales, groups + 1), *offset = grown(all_offsets, groups);
    if (grouping.group) copy_numbers(grouping.scales, groups, group, own.scales, own.scale_numbers, scale);
    else *scale = matrix.scales[output];
    if (grouping.offsets) copy_numbers(grouping.offsets, groups, group, own.offsets, own.offset_numbers, offset);
    for (int64_t first = 0, which = 0; first < matrix.inputs; first += group, which++) {
        int64_t last = std::min(first + group, matrix.inputs);
        for (int64_t i = first; i < last; i++) to[i] = own.values[i] * scale[which];
        for (int64_t i = first; grouping.offsets && i < last; i++) to[i] += offset[which];
    }
}

/// The first state of a token: the row of the embedding, or what is given in its place.
static void embed(const Model& model, const Batch& batch, int64_t at, float* to) {
    int64_t id = std::max<int64_t>(batch.ids[at], 0), size = model.hidden_size;
    if (batch.vectors)
        std::copy_n(batch.vectors + at * size, size, to);
    else if (id >= model.vocabulary)
        std::copy_n(model.added + (id - model.vocabulary) * size, size, to);
    else if (model.embedding_integers)
        copy_output(*model.embedding_integers, id, to);
    else
        for (int64_t i = 0, from = id * size; i < size; i++)
            to[i] = model.embedding ? model.embedding[from + i] : number(model.embedding_bfloat16[from + i]);
}

/// Copies the states of all tokens to where those of a layer are wanted, if they are; of absent tokens they are 0.
template <class From>
static void copy_states(
    Team& team, const Model& model, const Batch& batch, const Scratch& scratch, int64_t layer, const From* from
) {
    float* to = batch.states ? batch.states[layer] : nullptr;
    if (!to) return;
    team.each(batch.rows * batch.tokens, FEW_TOKENS, [&](Span tokens, int) {
        int64_t size = model.hidden_size;
        for (int64_t at = tokens.first; at < tokens.last; at++)
            for (int64_t i = 0, which = scratch.numbers[at]; i < size; i++)
                to[at * size + i] = which < 0 ? 0.0f : number(from[which * size + i]);
    });
}

/// `Stored` is what the cache holds, `Input` what products read. Of the last layer all tokens have keys and values, and only
/// those whose logits are wanted more, or all if the states after it are wanted.
template <class Stored, class Input>
static void run(const Model& model, const Batch& batch, Scratch& scratch, int64_t threads) {
    threads = std::clamp<int64_t>(threads, 1, MOST_WORKERS);
    Chosen &all = scratch.all, &last = scratch.last;
    choose(batch, scratch);
    scratch.changed.find(model.changes, model.change_count, batch.ids, scratch.places, all.tokens, last.tokens);
    group(model, all);
    group(model, last);
    int64_t count = all.count(), wanted = last.count(), hidden_size = model.hidden_size;
    int64_t heads_width = model.heads * model.head_size, stride = heads_width + 2 * model.kv_heads * model.head_size;
    int64_t room = Q_TILE * room_of(batch);
    float *all_hidden = grown(scratch.hidden, count * hidden_size), *last_hidden = grown(scratch.last_hidden, wanted * hidden_size);
    float* projected = grown(scratch.projected, count * stride);
    int64_t most = std::max(count, wanted);
    float *all_gates = grown(scratch.gates, most * model.intermediate), *all_scores = grown(scratch.scores, threads * room);
    Input* normed = grown<float, Input>(scratch.normed, most * hidden_size);
    Input* attended = grown<float, Input>(scratch.attended, most * heads_width);
    Input* intermediate = grown<float, Input>(scratch.intermediate, most * model.intermediate);
    Seen seen = {grown(scratch.depths, count), grown(scratch.counts, count), grown(scratch.seen, count * batch.tokens)};
    find(batch, scratch.places, scratch.numbers, seen);
    bool is_last_whole = batch.states && (batch.states[model.layers] || batch.states[model.layers + 1]);

    Team::run(threads, [&](Team& team) {
        float* hidden = all_hidden;
        int64_t rows = count; // of `hidden`
        auto rms_norm_all = [&](const float* weights) {
            team.each(rows, FEW_TOKENS, [&](Span share, int) {
                for (int64_t at = share.first; at < share.last; at++)
                    rms_norm(hidden + at * hidden_size, weights, hidden_size, model.epsilon, normed + at * hidden_size);
            });
        };
        auto add_to_hidden = [&](const Matrix& matrix, const Input* inputs) {
            add_product(team, matrix, scratch.rounding.of(team, matrix, inputs, rows), rows, hidden, hidden_size);
        };
        team.each(count, FEW_TOKENS, [&](Span tokens, int) {
            for (int64_t at = tokens.first; at < tokens.last; at++)
                embed(model, batch, scratch.places[at], hidden + at * hidden_size);
        });
        for (int64_t number = 0; number < model.layers; number++) {
            const Layer& layer = model.layer[number];
            copy_states(team, model, batch, scratch, number, all_hidden);
            rms_norm_all(layer.norm);
            float* part = projected;
            auto is_rounded = [](const Matrix& matrix) { return matrix.kind == INTEGERS; };
            const Matrix* first_rounded = std::find_if(layer.qkv, layer.qkv + 3, is_rounded);
            const Matrix& rounded_for = first_rounded < layer.qkv + 3 ? *first_rounded : layer.qkv[0];
            Operand<Input> operand = scratch.rounding.of(team, rounded_for, normed, count);
            for (const Matrix& matrix : layer.qkv) {
                if (!matrix.outputs) break;
                set_product(team, matrix, operand, count, part, stride);
                part += matrix.outputs;
            }
            for (const ChangedRows& rows_of : scratch.changed.all)
                scratch.changed.add(team, scratch.rounding, rows_of.layer[number].qkv, rows_of, normed, projected, stride);
            team.each(count, 1, [&](Span tokens, int) {
                place<Stored>(model, layer, batch, number, scratch, projected, tokens);
            });
            const Chosen& chosen = number + 1 < model.layers || is_last_whole ? all : last;
            team.each(chosen.groups.back(), 1, [&](Span groups, int worker) {
                float* scores = all_scores + worker * room;
                attend_all<Stored>(model, batch, number, seen, chosen, projected, attended, scores, groups);
            });
            if (&chosen == &last) {
                for (int64_t at = 0; at < wanted; at++)
                    std::copy_n(all_hidden + last.tokens[at] * hidden_size, hidden_size, last_hidden + at * hidden_size);
                hidden = last_hidden;
                rows = wanted;
            }
            add_to_hidden(layer.output, attended);
            for (const ChangedRows& rows_of : &chosen == &last ? scratch.changed.last : scratch.changed.all)
                scratch.changed.add(team, scratch.rounding, rows_of.layer[number].output, rows_of, attended, hidden, hidden_size);
            rms_norm_all(layer.post_attention_norm);
            Operand<Input> open_to = scratch.rounding.of(team, layer.gate, normed, rows);
            team.each(layer.gate.count(), 1, [&](Span panels, int) {
                for (; panels.first < panels.last; panels.first++) {
                    Outputs outputs(layer.gate, panels.first);
                    auto gates_of = [&](int64_t row) { return all_gates + row * model.intermediate + outputs.first; };
                    multiply(layer.gate, panels.first, open_to, rows, [&](int64_t row, const float* sums) {
                        std::copy_n(sums, outputs.count, gates_of(row));
                    });
                    multiply(layer.up, panels.first, open_to, rows, [&](int64_t row, const float* sums) {
                        alignas(64) float gates[N_TILE] = {};
                        alignas(64) Input open[N_TILE];
                        std::copy_n(gates_of(row), outputs.count, gates);
                        for (int64_t i = 0; i < N_TILE; i += LANES) {
                            Vector gate = load(gates + i);
                            store(open + i, gate / (1.0f + exponential(-gate)) * load(sums + i));
                        }
                        std::copy_n(open, outputs.count, intermediate + row * model.intermediate + outputs.first);
                    });
                }
            });
            add_to_hidden(layer.down, intermediate);
        }
        if (is_last_whole) copy_states(team, model, batch, scratch, model.layers, all_hidden);
        rms_norm_all(model.final_norm);
        const Input* read = normed; // by the head
        if (is_last_whole) {
            copy_states(team, model, batch, scratch, model.layers + 1, normed);
            Input* chosen = grown<float, Input>(scratch.wanted, wanted * hidden_size);
            for (int64_t at = 0; at < wanted; at++)
                std::copy_n(normed + last.tokens[at] * hidden_size, hidden_size, chosen + at * hidden_size);
            read = chosen;
        }
        Operand<Input> operand = scratch.rounding.of(team, model.head, read, wanted);
        set_product(team, model.head, operand, wanted, batch.logits, model.head.outputs, scratch.outputs.data());
        team.each(scratch.missing.size(), 1, [&](Span places, int) {
            for (int64_t at = places.first; at < places.last; at++)
                std::fill_n(batch.logits + scratch.missing[at] * model.head.outputs, model.head.outputs, 0.0f);
        });
    });
}

/// Whether all matrices are bfloat16 numbers.
static bool is_whole(const Model& model) {
    auto is_one = [](const Matrix& matrix) { return matrix.kind == BFLOAT16 || !matrix.outputs; };
    return is_one(model.head) && std::all_of(model.layer, model.layer + model.layers, [&](const Layer& layer) {
               return std::all_of(layer.qkv, layer.qkv + 3, is_one) && is_one(layer.output) && is_one(layer.gate) &&
                      is_one(layer.up) && is_one(layer.down);
           });
}

extern "C" {

/// How many bytes the panels of a matrix take, zeros included.
int64_t packed_bytes(const Matrix* matrix) {
    if (matrix->kind == INTEGERS) return matrix->count() * matrix->grouping.bytes(blocks_of(matrix->inputs));
    return matrix->count() * N_TILE * matrix->inputs * (matrix->kind == BFLOAT16 ? 2 : 4);
}

/// Sets the panels of a matrix of numbers `[outputs, inputs]`.
void pack_matrix(const Matrix* matrix, const void* weights, void* panels) {
    if (matrix->kind == BFLOAT16) pack((const BFloat16*)weights, matrix->outputs, matrix->inputs, (BFloat16*)panels);
    else pack((const float*)weights, matrix->outputs, matrix->inputs, (float*)panels);
}

/// Sets the panels of a matrix of few bits.
void pack_integers(const Matrix* matrix, const Weights* from, uint8_t* panels) {
    const Grouping& grouping = matrix->grouping;
    int64_t bytes = grouping.bytes(blocks_of(matrix->inputs));
#pragma omp parallel for
    for (int64_t panel = 0; panel < matrix->count(); panel++) {
        Weights first = from_output(*from, panel * N_TILE, matrix->inputs, grouping);
        pack_panel(first, matrix->outputs - panel * N_TILE, matrix->inputs, grouping, panels + panel * bytes);
    }
}

/// What `pack_integers` was given of `count` outputs from `first` on.
void unpack_integers(const Matrix* matrix, int64_t first, int64_t count, const Weights* to) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++)
        unpack_output(
            (const uint8_t*)matrix->panels, matrix->inputs, matrix->grouping, first + i,
            from_output(*to, i, matrix->inputs, matrix->grouping)
        );
}

/// The weights of `count` outputs from `first` on as numbers, `[count, inputs]`: as packed, of any kind.
void copy_outputs(const Matrix* matrix, int64_t first, int64_t count, float* to, int64_t threads) {
    auto copy = [&](int64_t output, float* numbers) {
        int64_t inputs = matrix->inputs, panel = output / N_TILE * N_TILE * inputs, place = output % N_TILE;
        if (matrix->kind == INTEGERS)
            copy_output(*matrix, output, numbers);
        else if (matrix->kind == FLOAT32)
            for (int64_t k = 0; k < inputs; k++) numbers[k] = ((const float*)matrix->panels)[panel + k * N_TILE + place];
        else
            for (int64_t k = 0; k < inputs; k++)
                numbers[k] = number(((const BFloat16*)matrix->panels)[panel + k / 2 * 2 * N_TILE + place * 2 + k % 2]);
    };
    Team::run(threads, [&](Team& team) {
        team.each(count, 1, [&](Span some, int) {
            for (; some.first < some.last; some.first++) copy(first + some.first, to + some.first * matrix->inputs);
        });
    });
}

/// Inputs are float, or bfloat16 if the matrix is. Returns 0; 1 if nothing was done because this CPU does not multiply so.
int64_t multiply_all(
    const Matrix* matrix, const void* inputs, int64_t are_bfloat16, int64_t rows, float* outputs, int64_t threads
) {
    if (are_bfloat16 && !HAS_DOTS) return 1;
    Team::run(threads, [&](Team& team) {
        Rounding rounding;
        if (are_bfloat16)
            set_product(team, *matrix, rounding.of(team, *matrix, (const BFloat16*)inputs, rows), rows, outputs, matrix->outputs);
        else
            set_product(team, *matrix, rounding.of(team, *matrix, (const float*)inputs, rows), rows, outputs, matrix->outputs);
    });
    return 0;
}

#ifdef _OPENMP
extern "C" { // as in omp.h, which does not come with every compiler that has OpenMP
int omp_get_max_threads();
void omp_set_num_threads(int);
}
#else
static int omp_get_max_threads() { return 1; }
static void omp_set_num_threads(int) {}
#endif

/// How many threads OpenMP gives to operations of the calling thread; returns how many it gave before.
int set_openmp_threads(int threads) {
    int before = omp_get_max_threads();
    omp_set_num_threads(threads);
    return before;
}

Scratch* new_scratch() { return new Scratch; }

void delete_scratch(Scratch* scratch) { delete scratch; }

/// Returns 0; 1 if nothing was done because an index is outside of what it indexes.
int64_t forward(const Model* model, const Batch* batch, Scratch* scratch, int64_t threads) {
    if (!is_sound(*model, *batch)) return 1;
    scratch->rounding.is_off = model->is_exact;
    if (model->is_exact)
        run<float, float>(*model, *batch, *scratch, threads);
    else if (model->is_bfloat16 && is_whole(*model) && HAS_DOTS)
        run<BFloat16, BFloat16>(*model, *batch, *scratch, threads);
    else if (model->is_bfloat16)
        run<BFloat16, float>(*model, *batch, *scratch, threads);
    else
        run<float, float>(*model, *batch, *scratch, threads);
    return 0;
}
}
