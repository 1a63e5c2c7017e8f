// The order in which weights of few bits are stored, which is the one in which `multiply_integers` reads them.
//
// A panel has a header and some blocks, and so on. A block has its values in fours of an output, `[4 inputs]`: of 8 bits
// `[8, N_TILE, 4]`; of fewer the lower four bits of two fours in the halves of bytes, `[4, N_TILE, 4]`, and then the others of as
// many fours as a byte has room for, `[1 or 2, N_TILE, 4]`. A header has the scales of a block's parts, `[parts, N_TILE]`, and
// their offsets; of `PRODUCTS` the factors of both, `[N_TILE]`, and then the whole numbers: of 8 bits `[groups, N_TILE]`, of 6
// bits three bytes for two groups, `[groups / 2, 3, N_TILE]` (see `Sixes`).

#include "integers.h"

/// Where a block is in a panel, its header and its values.
static int64_t header_of(const Grouping& grouping, int64_t block) {
    return grouping.bytes(block - block % grouping.header_blocks());
}

static int64_t values_of(const Grouping& grouping, int64_t block) {
    return grouping.bytes(block) + (block % grouping.header_blocks() ? 0 : grouping.header_bytes());
}

/// Where the bits of a block's value are: the lower ones from bit `shift` of a byte, the others from `high_shift` of another.
struct Place {
    int64_t low, shift, high, high_shift;
};

/// The places of the values of an output in a block, counted from the block's own.
struct Places {
    Place all[BLOCK];

    Places(int64_t bits, int64_t output) {
        int64_t more = bits == 8 ? 0 : bits - 4, of_byte = more ? 8 / more : 1;
        for (int64_t at = 0; at < BLOCK; at++) {
            int64_t four = at / 4, byte = output * 4 + at % 4;
            all[at] = {
                (bits == 8 ? four : four / 2) * N_TILE * 4 + byte, bits == 8 ? 0 : four % 2 * 4,
                BLOCK / 2 * N_TILE + four / of_byte * N_TILE * 4 + byte, four % of_byte * more,
            };
        }
    }
};

static void pack_values(const int8_t* values, int64_t inputs, const Grouping& grouping, int64_t output, uint8_t* to) {
    Places places(grouping.bits, output);
    int32_t shift = shift_of(grouping.bits, grouping.offsets);
    for (int64_t block = 0; block < blocks_of(inputs); block++) {
        uint8_t* bytes = to + values_of(grouping, block);
        for (int64_t at = 0; at < std::min(BLOCK, inputs - block * BLOCK); at++) {
            const Place& place = places.all[at];
            uint8_t value = values[block * BLOCK + at] + shift;
            bytes[place.low] |= (grouping.bits == 8 ? value : value & 15) << place.shift;
            if (grouping.bits == 5 || grouping.bits == 6) bytes[place.high] |= (value >> 4) << place.high_shift;
        }
    }
}

static void unpack_values(const uint8_t* from, int64_t inputs, const Grouping& grouping, int64_t output, int8_t* values) {
    Places places(grouping.bits, output);
    int32_t shift = shift_of(grouping.bits, grouping.offsets), mask = (1 << std::max<int64_t>(grouping.bits - 4, 0)) - 1;
    for (int64_t block = 0; block < blocks_of(inputs); block++) {
        const uint8_t* bytes = from + values_of(grouping, block);
        for (int64_t at = 0; at < std::min(BLOCK, inputs - block * BLOCK); at++) {
            const Place& place = places.all[at];
            int32_t value = grouping.bits == 8 ? bytes[place.low] : bytes[place.low] >> place.shift & 15;
            if (grouping.bits == 5 || grouping.bits == 6) value |= (bytes[place.high] >> place.high_shift & mask) << 4;
            values[block * BLOCK + at] = int8_t(value - shift);
        }
    }
}

/// Calls `with(at, scale, offset)` for each scale of an output, or factor of scales: its number, and where it and the offset
/// of that number are in a panel.
template <class With>
static void each_number(const Grouping& grouping, int64_t inputs, int64_t output, With with) {
    int64_t parts = grouping.scales == PRODUCTS ? 1 : grouping.parts(), blocks = grouping.header_blocks();
    int64_t size = Grouping::size_of(grouping.scales), more = Grouping::size_of(grouping.offsets);
    for (int64_t at = 0; grouping.group && at < numbers_of(grouping, inputs); at++) {
        int64_t header = header_of(grouping, at / parts * blocks), place = at % parts * N_TILE + output;
        with(at, header + place * size, header + parts * N_TILE * size + place * more);
    }
}

/// Where the whole number of a group's scale is, which has a byte.
static int64_t whole_scale_of(const Grouping& grouping, int64_t group, int64_t output) {
    int64_t groups = grouping.header_blocks() * grouping.parts();
    return header_of(grouping, group / grouping.parts()) + N_TILE * (2 + group % groups) + output;
}

/// Three bytes of an output, `N_TILE` apart, with two numbers of 6 bits for each of two groups: the first one's scale, its
/// offset, the second one's scale; and in their upper bits, the lowest first, the second one's offset.
template <class Byte> struct Sixes {
    Byte* bytes;
    bool is_second;

    Sixes(Byte* panel, const Grouping& grouping, int64_t group, int64_t output)
        : bytes(panel + header_of(grouping, group) + N_TILE * (4 + group % grouping.header_blocks() / 2 * 3) + output),
          is_second(group % 2) {}

    void set(uint8_t scale, uint8_t offset) {
        bytes[is_second ? 2 * N_TILE : 0] |= scale;
        if (!is_second) bytes[N_TILE] |= offset;
        for (int row = 0; is_second && row < 3; row++) bytes[row * N_TILE] |= (offset >> (2 * row) & 3) << 6;
    }
    uint8_t scale() const { return bytes[is_second ? 2 * N_TILE : 0] & 63; }
    uint8_t offset() const {
        if (!is_second) return bytes[N_TILE] & 63;
        return bytes[0] >> 6 | (bytes[N_TILE] >> 6) << 2 | (bytes[2 * N_TILE] >> 6) << 4;
    }
};

Weights from_output(const Weights& weights, int64_t output, int64_t inputs, const Grouping& grouping) {
    int64_t groups = groups_of(grouping, inputs), count = grouping.group ? numbers_of(grouping, inputs) : 0;
    auto numbers = [&](void* from, int64_t kind) {
        return from ? (char*)from + output * count * Grouping::size_of(kind) : nullptr;
    };
    auto whole = [&](int8_t* from) { return from ? from + output * groups : nullptr; };
    return {
        weights.values + output * inputs, numbers(weights.scales, grouping.scales),
        numbers(weights.offsets, grouping.offsets), whole(weights.scale_numbers), whole(weights.offset_numbers),
    };
}

static void pack_output(const Weights& from, int64_t inputs, const Grouping& grouping, int64_t output, uint8_t* to) {
    int64_t size = Grouping::size_of(grouping.scales), more = Grouping::size_of(grouping.offsets);
    pack_values(from.values, inputs, grouping, output, to);
    each_number(grouping, inputs, output, [&](int64_t at, int64_t scale, int64_t offset) {
        memcpy(to + scale, (const char*)from.scales + at * size, size);
        if (more) memcpy(to + offset, (const char*)from.offsets + at * more, more);
    });
    for (int64_t group = 0; grouping.scales == PRODUCTS && group < groups_of(grouping, inputs); group++)
        if (grouping.offsets) Sixes(to, grouping, group, output).set(from.scale_numbers[group], from.offset_numbers[group]);
        else to[whole_scale_of(grouping, group, output)] = from.scale_numbers[group];
}

void pack_panel(const Weights& from, int64_t outputs, int64_t inputs, const Grouping& grouping, uint8_t* to) {
    memset(to, 0, grouping.bytes(blocks_of(inputs)));
    for (int64_t output = 0; output < std::min(outputs, N_TILE); output++)
        pack_output(from_output(from, output, inputs, grouping), inputs, grouping, output, to);
}

void unpack_output(const uint8_t* panels, int64_t inputs, const Grouping& grouping, int64_t number, const Weights& to) {
    const uint8_t* from = panels + number / N_TILE * grouping.bytes(blocks_of(inputs));
    int64_t size = Grouping::size_of(grouping.scales), more = Grouping::size_of(grouping.offsets), output = number % N_TILE;
    unpack_values(from, inputs, grouping, output, to.values);
    each_number(grouping, inputs, output, [&](int64_t at, int64_t scale, int64_t offset) {
        memcpy((char*)to.scales + at * size, from + scale, size);
        if (more) memcpy((char*)to.offsets + at * more, from + offset, more);
    });
    for (int64_t group = 0; grouping.scales == PRODUCTS && group < groups_of(grouping, inputs); group++) {
        if (!grouping.offsets) {
            to.scale_numbers[group] = int8_t(from[whole_scale_of(grouping, group, output)]);
            continue;
        }
        Sixes sixes(from, grouping, group, output);
        to.scale_numbers[group] = sixes.scale();
        to.offset_numbers[group] = sixes.offset();
    }
}
