// Token trees: which nodes to draft, and the keys and values of an accepted path, moved together.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

/// A node that may be added to a tree, or has been.
struct Node {
    double cost;   // minus the logarithm of the estimated probability of its path
    double before; // the logarithm of that of its parent's
    int64_t parent, depth, rank;
    bool is_off_spine; // whether a token before it is not the best of its position
};

/// One row's tree: the nodes taken so far, and a heap of those that may be taken next.
struct Tree {
    const double* log_probs; // [positions, candidates]
    int64_t positions, candidates;
    double discount; // added for each token that follows one off the spine
    std::vector<Node> taken, heap;
    std::vector<int64_t> path, other_path;

    void ranks_of(const Node& node, std::vector<int64_t>& ranks) const {
        ranks.assign(node.depth + 1, node.rank);
        for (int64_t up = node.parent; up >= 0; up = taken[up].parent) ranks[taken[up].depth] = taken[up].rank;
    }

    /// By cost, then by the ranks of the path. A cost that is not a number is before nothing.
    bool is_before(const Node& node, const Node& other) {
        if (node.cost != other.cost) return node.cost < other.cost;
        ranks_of(node, path);
        ranks_of(other, other_path);
        return path < other_path;
    }

    // The two halves of Python's heapq, step by step: with costs that are not numbers the order depends on them.
    void rise(int64_t first, int64_t at) {
        Node node = heap[at];
        while (at > first) {
            int64_t above = (at - 1) / 2;
            if (!is_before(node, heap[above])) break;
            heap[at] = heap[above];
            at = above;
        }
        heap[at] = node;
    }

    void push(int64_t parent, int64_t depth, int64_t rank, double before, bool is_off_spine) {
        double gain = before + log_probs[depth * candidates + rank] + (is_off_spine ? discount : 0.0);
        heap.push_back({-gain, before, parent, depth, rank, is_off_spine});
        rise(0, heap.size() - 1);
    }

    Node pop() {
        Node last = heap.back();
        heap.pop_back();
        if (heap.empty()) return last;
        Node first = heap[0];
        int64_t at = 0, end = heap.size();
        for (int64_t child = 1; child < end; child = 2 * at + 1) {
            if (child + 1 < end && !is_before(heap[child], heap[child + 1])) child++;
            heap[at] = heap[child];
            at = child;
        }
        heap[at] = last;
        rise(0, at);
        return first;
    }

    void grow(int64_t budget) {
        taken.clear();
        heap.clear();
        push(-1, 0, 0, 0.0, false);
        while (!heap.empty() && (int64_t)taken.size() < budget) {
            Node node = pop();
            if (node.cost == INFINITY) return;
            int64_t index = taken.size();
            taken.push_back(node);
            if (node.rank + 1 < candidates) push(node.parent, node.depth, node.rank + 1, node.before, node.is_off_spine);
            if (node.depth + 1 < positions) push(index, node.depth + 1, 0, -node.cost, node.is_off_spine || node.rank);
        }
    }
};

extern "C" {

/// For each row the nodes of its most promising tree, best first: their depths, ranks and parents, each [rows, budget], -1
/// after the last one. Returns the most nodes of a row.
int64_t grow_trees(
    const double* log_probs, int64_t rows, int64_t positions, int64_t candidates, int64_t budget, double discount,
    int64_t* depths, int64_t* ranks, int64_t* parents
) {
    Tree tree = {log_probs, positions, candidates, discount, {}, {}, {}, {}};
    int64_t most = 0;
    for (int64_t row = 0; row < rows; row++, tree.log_probs += positions * candidates) {
        tree.grow(budget);
        int64_t count = tree.taken.size();
        for (int64_t i = 0; i < budget; i++) {
            bool is_there = i < count;
            depths[row * budget + i] = is_there ? tree.taken[i].depth : -1;
            ranks[row * budget + i] = is_there ? tree.taken[i].rank : -1;
            parents[row * budget + i] = is_there ? tree.taken[i].parent : -1;
        }
        most = count > most ? count : most;
    }
    return most;
}

/// Moves the slots of each row's path, [rows, nodes] offsets from the row's first slot, to the row's first slots; offsets
/// below 0 stand after the path. `stored` are tensors [rows, slots, slot_bytes]. Returns 0; 1 if nothing was done because
/// a path does not rise, so that a slot would be written before it is read, or leaves its row.
int64_t compact_paths(
    char* const* stored, int64_t tensors, int64_t slots, int64_t slot_bytes, const int64_t* first_slots,
    const int64_t* paths, int64_t rows, int64_t nodes
) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t* path = paths + row * nodes;
        for (int64_t i = 0; i < nodes && path[i] >= 0; i++)
            if (path[i] < i || (i && path[i] <= path[i - 1]) || first_slots[row] < 0 || first_slots[row] + path[i] >= slots)
                return 1;
    }
    for (int64_t t = 0; t < tensors; t++)
        for (int64_t row = 0; row < rows; row++) {
            char* first = stored[t] + (row * slots + first_slots[row]) * slot_bytes;
            const int64_t* path = paths + row * nodes;
            for (int64_t i = 0; i < nodes && path[i] >= 0; i++)
                if (path[i] != i) std::memcpy(first + i * slot_bytes, first + path[i] * slot_bytes, slot_bytes);
        }
    return 0;
}
}
