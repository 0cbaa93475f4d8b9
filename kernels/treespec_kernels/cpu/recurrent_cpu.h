// Recurrent layers: a short causal convolution, and the gated delta rule or Mamba 2's along the paths of token trees.
// Included by decoder_cpu.cpp; the reference is treespec_kernels/recurrent/state_update.py.
//
// A pass first computes the rows that a request has committed since its states were stored (replayed rows), from the
// inputs that are kept, and stores the states after them. It then computes its own rows, each from its parent's state,
// and keeps their inputs. A row has one order of operations, on whatever path it is computed.

// log(1 + exp(x)). log(1 + t) = 2 artanh(s) with s = t / (2 + t); the series is cut off below 1e-8.
inline vec softplus(vec x) {
    const vec t = exp(x < 0.0f ? x : -x), s = t / (2.0f + t), square = s * s;
    vec series = splat(1.0f / 15);
    for (float odd : {13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) series = fma(series, square, splat(1.0f / odd));
    return (x < 0.0f ? vec{} : x) + 2.0f * s * series;
}

inline vec sigmoid(vec x) { return 1.0f / (1.0f + exp(-x)); }

// Rows of a pass of recurrent layers, the same for all of them.
class RecurrentRows {
    struct Step {  // update of the state in buffer `from` by a tree slot, to buffer `to`
        int64_t slot, from, to;
    };
    struct Plan {  // a request's updates
        const RequestState* state;
        std::vector<Step> steps;  // updates of the tree; buffer 0 is the stored state, the others are scratch
        int64_t buffers;          // number of scratch buffers
        int64_t first;            // its first row among all rows: replayed rows, earlier slots and the pass's own
    };

    const Model& model;
    const Batch& batch;
    // width: inputs of a token; rated: heads, rounded up to whole vectors; row_size: outputs of `make`; total: rows,
    // including replayed ones and earlier slots
    const int64_t history, channels, width, rated, row_size, inner, total;
    std::vector<Plan> requests;
    std::vector<std::pair<int64_t, int64_t>> rows;  // rows to compute: request, and index among its rows
    static inline thread_local std::vector<scalar> fresh_rows;
    static inline thread_local std::vector<float> made_rows, mixed_rows;

    // Sets the order of a request's updates. A node's last child overwrites its state; the others come before it, in a
    // further buffer. So a chain has one buffer, and a tree one more for each node of a path with other children.
    // Committed rows are a chain before the tree, which overwrites the stored state. Of earlier slots, only ancestors
    // of the pass's rows are computed.
    void order(Plan& of) {
        const RequestState& state = *of.state;
        const int64_t slots = state.earlier + state.num_rows;
        std::vector<std::vector<int64_t>> children(slots);
        std::vector<std::pair<int64_t, int64_t>> open;  // slots to compute, with the buffer of their parent's state
        for (int64_t slot = slots - 1; slot > 0; slot--)
            if (slot >= state.earlier || !children[slot].empty()) children[state.parents[slot]].push_back(slot);
        of.buffers = 0;
        open.push_back({0, 0});
        while (!open.empty()) {
            const auto [slot, from] = open.back();
            open.pop_back();
            const bool replaces = slot ? slot == children[state.parents[slot]].front() : state.commits > 0;
            const int64_t to = replaces && slot != state.commits ? from : from + 1;
            of.steps.push_back({slot, from, to});
            of.buffers = std::max(of.buffers, to);
            // The last child comes first in `children`, so it is popped last.
            for (int64_t child : children[slot]) open.push_back({child, to});
        }
    }

    // Sets the inputs that the convolution of a request's row reads, from the most recent one back.
    void find_taps(const Plan& of, int64_t layer, int64_t row, const scalar** taps) const {
        const RequestState& state = *of.state;
        const scalar* kept = (const scalar*)state.inputs + layer * state.stored_rows * width;
        int64_t i = 0;
        for (int64_t slot = row - state.replayed; slot >= 0 && i <= history; slot = state.parents[slot])
            taps[i++] = slot < state.earlier ? kept + (history + slot) * width : fresh_row(state, slot - state.earlier);
        int64_t place = history + (i ? state.replayed - 1 : row);  // index of a kept input
        for (; i <= history; i++) taps[i] = kept + place-- * width;
    }

    // Returns the row of the pass that is a request's own row.
    static int64_t row_of(const RequestState& state, int64_t own) {
        return own < state.commits ? state.first_row + own : state.tree_row + own - state.commits;
    }

    const scalar* fresh_row(const RequestState& state, int64_t own) const { return fresh + row_of(state, own) * width; }

    // Writes the convolution of a row to `out`.
    void convolve(const Layer& layer, const scalar** taps, float* out) const {
        const float* weight = layer.conv;
        for (int64_t i = 0; i < channels; i += LANES) {
            vec sum = widen(taps[history] + i) * load<vec>(weight + i);
            if (layer.conv_bias) sum += load<vec>(layer.conv_bias + i);
            for (int64_t t = 1; t <= history; t++)
                sum = fma(widen(taps[history - t] + i), load<vec>(weight + t * channels + i), sum);
            store(out + i, sum);
        }
    }

    // Divides a vector by its length, and multiplies it by `scale`.
    static void normalize(float* x, int64_t size, float scale) {
        Sums squares;
        for (int64_t i = 0; i < size; i += LANES) {
            const vec v = load<vec>(x + i);
            squares.at(i) = fma(v, v, squares.at(i));
        }
        const float factor = scale / std::sqrt(squares.total() + 1e-6f);
        for (int64_t i = 0; i < size; i += LANES) store(x + i, load<vec>(x + i) * factor);
    }

    // Returns values of the heads from `first` on, with zeros after the last one.
    template <class T> vec of_heads(const T* values, int64_t first) const {
        T some[LANES] = {};
        std::copy_n(values + first, std::min(LANES, model.state_heads - first), some);
        return widen(some);
    }

    // Makes q, k, v, beta and decay of a row from its inputs. Mamba 2's beta is the time step.
    void make(const Layer& layer, const scalar** taps, float* out) const {
        convolve(layer, taps, out);
        for (int64_t i = 0; i < channels; i += LANES) store(out + i, activate(SILU, load<vec>(out + i)));
        const float length = 1.0f / std::sqrt(float(model.key_dim));
        for (int64_t head = 0; head < 2 * model.key_heads && !layer.skip; head++)
            normalize(out + head * model.key_dim, model.key_dim, head < model.key_heads ? length : 1.0f);
        const scalar *beta = taps[0] + channels, *decay = taps[0] + width - model.state_heads;
        float *to = out + channels, *decays = to + rated;
        for (int64_t i = 0; i < model.state_heads; i += LANES) {
            const vec step = softplus(of_heads(decay, i) * model.step_scale + of_heads(layer.dt_bias, i));
            store(to + i, layer.skip ? step : model.beta_scale * sigmoid(of_heads(beta, i)));
            store(decays + i, exp(of_heads(layer.rate, i) * step));
        }
    }

    static constexpr int64_t COLUMNS = 64;  // columns of a state that are updated at once

    // Computes N vectors of columns of a state from those of another, which may be the same, and a row's output in them.
    // Mamba 2's rule, with `skip`, reads nothing of the state.
    template <int N>
    static void update(const float* from, float* to, int64_t step, const float* q, const float* k, const float* v,
                       int64_t key_dim, float beta, float decay, const float* skip, float* out) {
        vec read[N] = {}, sum[N] = {}, delta[N];
        if (!skip)
            for (int64_t i = 0; i < key_dim; i++)
                for (int j = 0; j < N; j++) read[j] = fma(load<vec>(from + i * step + j * LANES), splat(k[i]), read[j]);
        for (int j = 0; j < N; j++) delta[j] = (load<vec>(v + j * LANES) - read[j] * decay) * beta;
        for (int64_t i = 0; i < key_dim; i++)
            for (int j = 0; j < N; j++) {
                const vec state = fma(splat(k[i]), delta[j], load<vec>(from + i * step + j * LANES) * decay);
                store(to + i * step + j * LANES, state);
                sum[j] = fma(state, splat(q[i]), sum[j]);
            }
        for (int j = 0; j < N; j++) {
            if (skip) sum[j] = fma(load<vec>(v + j * LANES), splat(*skip), sum[j]);
            store(out + j * LANES, sum[j]);
        }
    }

    // Updates `columns` columns, a multiple of 16, of a head's state by one row.
    void update_head(const Layer& layer, int64_t head, int64_t column, int64_t columns, const float* from, float* to,
                     const float* row, float* out) const {
        const int64_t keys = model.key_heads * model.key_dim;
        const int64_t key = model.tiled ? head % model.key_heads : head / (model.state_heads / model.key_heads);
        const float *q = row + key * model.key_dim, *k = q + keys, *v = row + 2 * keys + head * model.value_dim + column;
        const float beta = row[channels + head], decay = row[channels + rated + head];
        const float* skip = layer.skip ? layer.skip + head : nullptr;
        constexpr int N = 4;
        int64_t i = 0;
        for (; i + N * LANES <= columns; i += N * LANES)
            update<N>(from + i, to + i, model.value_dim, q, k, v + i, model.key_dim, beta, decay, skip, out + i);
        for (; i < columns; i += LANES)
            update<1>(from + i, to + i, model.value_dim, q, k, v + i, model.key_dim, beta, decay, skip, out + i);
    }

    // Runs a request's updates of some columns of one head.
    void run_head(const Layer& layer, const Plan& of, int64_t index, int64_t head, int64_t column) const {
        static thread_local std::vector<float> scratch;
        const RequestState& state = *of.state;
        const int64_t size = model.key_dim * model.value_dim, columns = std::min(COLUMNS, model.value_dim - column);
        float* stored = state.matrices + (index * model.state_heads + head) * size + column;
        float dropped[COLUMNS];
        for (int64_t i = 0; i < state.replayed; i++)
            update_head(layer, head, column, columns, stored, stored, made + (of.first + i) * row_size, dropped);
        scratch.resize(of.buffers * size);
        const auto buffer = [&](int64_t i) { return i ? scratch.data() + (i - 1) * size : stored; };
        for (const Step& step : of.steps) {
            const int64_t own = step.slot - state.earlier, at = head * model.value_dim + column;
            update_head(layer, head, column, columns, buffer(step.from), buffer(step.to),
                        made + (of.first + state.replayed + step.slot) * row_size,
                        own < 0 ? dropped : mixed + row_of(state, own) * inner + at);
        }
    }

    // Keeps the inputs that the next pass reads.
    void keep(int64_t layer) const {
        for (const Plan& of : requests) {
            const RequestState& state = *of.state;
            scalar* kept = (scalar*)state.inputs + layer * state.stored_rows * width;
            const int64_t old = std::max(history - state.commits, int64_t(0));  // inputs of the history to keep
            std::memmove(kept, kept + (state.replayed + state.commits) * width, old * width * sizeof(scalar));
            scalar* to = kept + (old + state.earlier) * width;
            for (int64_t own = state.commits - (history - old); own < state.num_rows; own++, to += width)
                std::copy_n(fresh_row(state, own), width, to);
        }
    }

    static int64_t count_rows(const Batch& batch) {
        int64_t count = 0;
        for (const RequestState *state = batch.requests, *end = state + batch.num_requests; state < end; state++)
            count += state->replayed + state->earlier + state->num_rows;
        return count;
    }

    scalar* fresh = nullptr;  // inputs of the pass's rows, [num_rows, width]
    float *made = nullptr, *mixed = nullptr;

  public:
    RecurrentRows(const Model& model, const Batch& batch)
        : model(model), batch(batch), history(model.kernel - 1), channels(model.channels),
          width(channels + model.rates * model.state_heads), rated((model.state_heads + LANES - 1) / LANES * LANES),
          row_size(channels + 2 * rated),
          inner(model.state_heads * model.value_dim), total(count_rows(batch)) {
        int64_t first = 0;
        for (int64_t i = 0; i < batch.num_requests; i++) {
            const RequestState& state = batch.requests[i];
            requests.push_back({&state, {}, 0, first});
            order(requests.back());
            for (int64_t row = 0; row < state.replayed; row++) rows.push_back({i, row});
            for (const Step& step : requests.back().steps) rows.push_back({i, state.replayed + step.slot});
            first += state.replayed + state.earlier + state.num_rows;
        }
    }

    // Mixes the projections y, [num_rows, step], of a layer with a state per head: channels, rates, gate. Writes a.
    void mix_heads(const Layer& layer, int64_t index, const float* y, int64_t step, scalar* a, int threads) {
        const int64_t n = batch.num_rows;
        fresh_rows.resize(n * width + LANES), made_rows.resize(total * row_size), mixed_rows.resize(n * inner);
        fresh = fresh_rows.data(), made = made_rows.data(), mixed = mixed_rows.data();
        for (int64_t r = 0; r < n; r++)  // the end of a row's last vector is overwritten by the next row
            for (int64_t i = 0; i < width; i += LANES) store(fresh + r * width + i, load<vec>(y + r * step + i));
        parallel(threads, int64_t(rows.size()), [&](int64_t row) {
            const FlushDenormals flushing;
            const scalar* taps[16];
            find_taps(requests[rows[row].first], index, rows[row].second, taps);
            make(layer, taps, made + (requests[rows[row].first].first + rows[row].second) * row_size);
        });
        const int64_t blocks = (model.value_dim + COLUMNS - 1) / COLUMNS, units = model.state_heads * blocks;
        parallel(threads, int64_t(requests.size()) * units, [&](int64_t unit) {
            const FlushDenormals flushing;
            run_head(layer, requests[unit / units], index, unit % units / blocks, unit % blocks * COLUMNS);
        });
        keep(index);
        // A Gated DeltaNet's heads are normalised before the gate, Mamba 2's groups of heads after it or not at all, with
        // gains of all.
        const int64_t size = layer.skip ? inner / model.key_heads : model.value_dim;
        parallel(threads, n, [&](int64_t r) {
            for (int64_t start = 0; start < inner; start += size) {
                float* row = mixed + r * inner + start;
                const float* gate = y + r * step + width + start;
                if (layer.skip)
                    for (int64_t i = 0; i < size; i += LANES)
                        store(row + i, load<vec>(row + i) * activate(SILU, load<vec>(gate + i)));
                const Norm gain{layer.gain + (layer.skip ? start : 0), nullptr};
                const Moments of = model.mixer_norm ? moments(row, size, model.mixer_eps, false) : Moments{0.0f, 1.0f};
                for (int64_t i = 0; i < size; i += LANES) {
                    const vec made = normed(row, of, gain, i);
                    store(a + r * inner + start + i, layer.skip ? made : made * activate(SILU, load<vec>(gate + i)));
                }
            }
        });
    }

    // Mixes the projections y, [num_rows, 3 * hidden], of LFM2's gated convolution. Writes a.
    void mix_conv(const Layer& layer, int64_t index, const float* y, int64_t step, scalar* a, int threads) {
        const int64_t n = batch.num_rows;
        fresh_rows.resize(n * width), mixed_rows.resize(n * channels);
        fresh = fresh_rows.data(), mixed = mixed_rows.data();
        for (int64_t r = 0; r < n; r++)
            for (int64_t i = 0; i < channels; i += LANES) {
                const float* row = y + r * step + i;
                store(fresh + r * width + i, load<vec>(row) * load<vec>(row + 2 * channels));
            }
        parallel(threads, int64_t(rows.size()), [&](int64_t row) {
            const Plan& of = requests[rows[row].first];
            const int64_t own = rows[row].second - of.state->replayed - of.state->earlier, r = row_of(*of.state, own);
            if (own < 0) return;
            const scalar* taps[16];
            find_taps(of, index, rows[row].second, taps);
            convolve(layer, taps, mixed + r * channels);
            for (int64_t i = 0; i < channels; i += LANES)
                store(a + r * channels + i, load<vec>(mixed + r * channels + i) * load<vec>(y + r * step + channels + i));
        });
        keep(index);
    }
};
