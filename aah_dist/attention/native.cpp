// Attention that computes each head's band only, forward and backward, on CPU.  native.py calls it.
//
// A query block of QUERIES rows meets the keys that any of its rows may read in blocks of at most KEYS: matrix products
// by the BLAS of torch, and softmax between them on a block that stays in the second-level cache.  The forward pass
// keeps a running maximum and sum for each row (the online softmax of FlashAttention) and saves the log-sum-exp; the
// backward pass computes the probabilities again from it.  What lies outside a row's window in its block, at most
// QUERIES keys, is multiplied and then set to zero.
//
// Nothing here depends on the number of threads: a unit of work writes to places of its own, in one order.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t QUERIES = 64, KEYS = 256;
constexpr int64_t ALIGN = 16;  // lengths of key blocks are multiples of it; even, as the dropout mask needs

struct Matrices {  // [B, heads, T, D] with unit stride along D
  void* data;
  int64_t batch, head, row;  // strides, in elements
};

struct Call {
  Matrices q, k, v, out, grad, dq, dk, dv;  // the last four in backward only
  void* log_sum_exp;                        // [B, H, T], contiguous
  const int64_t* windows;                   // [H], each at most T
  const int64_t* seeds;                     // [B, H], or null without dropout
  int64_t heads, kv_heads, length, size;
  double scale, keep_scale;  // keep_scale: 1 / (1 - dropout rate)
  int64_t threshold;         // a cell is dropped if its 16 bits, as a signed number, are below
  const int64_t* units;      // b * H + h in forward, b * H_kv + h_kv in backward, those with the most work first
  int64_t num_units;
  int64_t next;  // the first unit that no thread has taken
  void* gemm;
  void* set_threads;
};

std::atomic<int64_t> computed_cells{0};

template <typename Real>
using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const Real*, const Real*,
                      const int*, const Real*, const int*, const Real*, Real*, const int*);

// BLAS counts in columns: a row-major product is the product of the transposes in the other order.
template <typename Real>
struct Product {
  Gemm<Real> gemm;

  // c [m, n] = alpha * a b + beta * c, row-major, where a is [m, k] or, if transposed, [k, m]; b alike.
  void operator()(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, Real alpha, const Real* a,
                  int64_t row_a, const Real* b, int64_t row_b, Real beta, Real* c, int64_t row_c) const {
    const int m_ = m, n_ = n, k_ = k, row_a_ = row_a, row_b_ = row_b, row_c_ = row_c;
    gemm(transpose_b ? "T" : "N", transpose_a ? "T" : "N", &n_, &m_, &k_, &alpha, b, &row_b_, a, &row_a_, &beta, c,
         &row_c_);
  }
};

inline double exponential(double x) { return std::exp(x); }

// For x of at most 0, or above it by rounding, within 2 units in the last place, in operations that the compiler turns
// into vectors: x is n ln 2 + r with |r| <= ln 2 / 2, exp(r) is Cephes' polynomial.  NaN stays NaN.
inline float exponential(float x) {
  constexpr float SHIFT = 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number and leaves that in the low bits
  x = x < -87.f ? -87.f : x;
  const float shifted = x * 1.44269504088896341f + SHIFT, n = shifted - SHIFT;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;  // 2^n
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return y * power;
}

// Attention dropout as dropout.py defines it: 16 bits of a cell follow from (seed, query, key) alone.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Bits of keys first .. first + num - 1 of a query's row; first is even, and one entry more is written if num is odd.
void dropout_bits(int64_t seed, int64_t query, int64_t first, int64_t num, int16_t* bits) {
  const uint64_t row = mix(mix(seed) + static_cast<uint64_t>(query + 1) * 0x9E3779B97F4A7C15u);
  const uint32_t low = row, high = row >> 32, pair = first / 2;
  for (uint32_t i = 0; i < (num + 1) / 2; ++i) {
    uint32_t word = low + (pair + i) * 0x9E3779B9u;
    word = (word ^ (word >> 16)) * 0x85EBCA6Bu ^ high;
    word = (word ^ (word >> 15)) * 0xC2B2AE35u;
    word ^= word >> 16;
    bits[2 * i] = word & 0xFFFF;
    bits[2 * i + 1] = word >> 16;
  }
}

// One query block's keys, and their division into blocks of nearly equal length.
struct KeyBlocks {
  int64_t first, step;

  // Of queries start .. stop - 1.
  KeyBlocks(int64_t start, int64_t stop, int64_t window) : first(std::max<int64_t>(0, start - window + 1) / 2 * 2) {
    const int64_t num = (stop - first + KEYS - 1) / KEYS;
    step = ((stop - first + num - 1) / num + ALIGN - 1) / ALIGN * ALIGN;
  }
};

template <typename Real>
struct Head {
  const Call& call;
  int64_t batch, head, window;
  int64_t seed = 0;
  Product<Real> product;
  const Real scale, keep_scale;

  Head(const Call& call, int64_t batch, int64_t head)
      : call(call), batch(batch), head(head), window(call.windows[head]),
        product{reinterpret_cast<Gemm<Real>>(call.gemm)}, scale(call.scale), keep_scale(call.keep_scale) {
    if (call.seeds) seed = call.seeds[batch * call.heads + head];
  }

  Real* of(const Matrices& x, int64_t row) const { return at(x, head, row); }
  Real* of_kv(const Matrices& x, int64_t row) const { return at(x, head / (call.heads / call.kv_heads), row); }
  Real* log_sum_exp() const {
    return static_cast<Real*>(call.log_sum_exp) + (batch * call.heads + head) * call.length;
  }

  // Zeroes the columns of a row [num] of scores, key `first` first, that query i does not read; the others are
  // begin .. end - 1.
  void clip(Real* row, int64_t i, int64_t first, int64_t num, int64_t& begin, int64_t& end) const {
    begin = std::clamp<int64_t>(i - window + 1 - first, 0, num);
    end = std::clamp<int64_t>(i + 1 - first, begin, num);
    std::fill(row, row + begin, Real(0));
    std::fill(row + end, row + num, Real(0));
  }

  void drop(Real* row, const int16_t* bits, int64_t num) const {
    const int16_t threshold = call.threshold;
    for (int64_t j = 0; j < num; ++j) row[j] = bits[j] < threshold ? Real(0) : row[j];
  }

  void forward(Real* p, int16_t* bits);
  void backward(Real* p, Real* ds, int16_t* bits);

 private:
  Real* at(const Matrices& x, int64_t of_heads, int64_t row) const {
    return static_cast<Real*>(x.data) + batch * x.batch + of_heads * x.head + row * x.row;
  }
};

template <typename Real>
void Head<Real>::forward(Real* p, int16_t* bits) {
  const int64_t size = call.size;
  int64_t cells = 0;
  for (int64_t start = 0; start < call.length; start += QUERIES) {
    const int64_t stop = std::min(start + QUERIES, call.length), rows = stop - start;
    const KeyBlocks blocks(start, stop, window);
    Real largest[QUERIES], sum[QUERIES];
    std::fill(largest, largest + rows, -std::numeric_limits<Real>::infinity());
    std::fill(sum, sum + rows, Real(0));
    for (int64_t first = blocks.first; first < stop; first += blocks.step) {
      const int64_t num = std::min(blocks.step, stop - first);
      cells += rows * num;
      product(false, true, rows, num, size, scale, of(call.q, start), call.q.row, of_kv(call.k, first), call.k.row, 0,
              p, num);
      for (int64_t r = 0; r < rows; ++r) {
        Real* row = p + r * num;
        int64_t begin, end;
        clip(row, start + r, first, num, begin, end);
        if (begin == end) continue;
        Real most = largest[r], total = 0;
#pragma omp simd reduction(max : most)
        for (int64_t j = begin; j < end; ++j) most = row[j] > most ? row[j] : most;
#pragma omp simd reduction(+ : total)
        for (int64_t j = begin; j < end; ++j) {
          row[j] = exponential(row[j] - most);
          total += row[j];
        }
        if (most > largest[r] && first > blocks.first) {
          const Real less = std::exp(largest[r] - most);
          sum[r] *= less;
          Real* out = of(call.out, start + r);
          for (int64_t d = 0; d < size; ++d) out[d] *= less;
        }
        largest[r] = most;
        sum[r] += total;
        if (call.seeds) {
          dropout_bits(seed, start + r, first, num, bits);
          drop(row, bits, num);
        }
      }
      product(false, false, rows, size, num, 1, p, num, of_kv(call.v, first), call.v.row, first > blocks.first,
              of(call.out, start), call.out.row);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const Real factor = keep_scale / sum[r];
      Real* out = of(call.out, start + r);
      for (int64_t d = 0; d < size; ++d) out[d] *= factor;
      log_sum_exp()[start + r] = largest[r] + std::log(sum[r]);
    }
  }
  computed_cells += cells;
}

// dv += keep P' dO;  dS = P * (keep mask(dO V^T) - rowsum(dO * O));  dq = scale dS K;  dk += scale dS' Q.
template <typename Real>
void Head<Real>::backward(Real* p, Real* ds, int16_t* bits) {
  const int64_t size = call.size;
  int64_t cells = 0;
  for (int64_t start = 0; start < call.length; start += QUERIES) {
    const int64_t stop = std::min(start + QUERIES, call.length), rows = stop - start;
    const KeyBlocks blocks(start, stop, window);
    const Real *q = of(call.q, start), *grad = of(call.grad, start);
    // rowsum(dO * O) equals rowsum(P * mask(dO V^T) keep).  The second, taken where one block holds a row's keys, is
    // exactly what it is to be subtracted from if a row has one key: Adam would make steps of what rounding leaves.
    const bool whole = blocks.first + blocks.step >= stop;
    Real delta[QUERIES];
    for (int64_t r = 0; r < rows && !whole; ++r) {
      const Real *out = of(call.out, start + r), *g = grad + r * call.grad.row;
      Real total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t d = 0; d < size; ++d) total += out[d] * g[d];
      delta[r] = total;
    }
    for (int64_t first = blocks.first; first < stop; first += blocks.step) {
      const int64_t num = std::min(blocks.step, stop - first);
      cells += rows * num;
      const Real *k = of_kv(call.k, first), *v = of_kv(call.v, first);
      product(false, true, rows, num, size, scale, q, call.q.row, k, call.k.row, 0, p, num);
      for (int64_t r = 0; r < rows; ++r) {
        Real* row = p + r * num;
        int64_t begin, end;
        clip(row, start + r, first, num, begin, end);
        const Real log_sum = log_sum_exp()[start + r];
        for (int64_t j = begin; j < end; ++j) row[j] = exponential(row[j] - log_sum);
      }
      const Real* kept = p;
      if (call.seeds) {
        std::copy(p, p + rows * num, ds);
        for (int64_t r = 0; r < rows; ++r) {
          dropout_bits(seed, start + r, first, num, bits + r * (KEYS + ALIGN));
          drop(ds + r * num, bits + r * (KEYS + ALIGN), num);
        }
        kept = ds;
      }
      product(true, false, num, size, rows, keep_scale, kept, num, grad, call.grad.row, 1, of_kv(call.dv, first),
              call.dv.row);
      product(false, true, rows, num, size, keep_scale, grad, call.grad.row, v, call.v.row, 0, ds, num);
      for (int64_t r = 0; r < rows; ++r) {
        Real *row = ds + r * num, *of_p = p + r * num;
        if (call.seeds) drop(row, bits + r * (KEYS + ALIGN), num);
        Real total = 0;
        if (whole) {
#pragma omp simd reduction(+ : total)
          for (int64_t j = 0; j < num; ++j) total += of_p[j] * row[j];
        } else {
          total = delta[r];
        }
        for (int64_t j = 0; j < num; ++j) row[j] = of_p[j] * (row[j] - total);
      }
      product(false, false, rows, size, num, scale, ds, num, k, call.k.row, first > blocks.first, of(call.dq, start),
              call.dq.row);
      product(true, false, num, size, rows, scale, ds, num, q, call.q.row, 1, of_kv(call.dk, first), call.dk.row);
    }
  }
  computed_cells += cells;
}

template <typename Real>
void run(Call& call, bool backward) {
  std::vector<Real> p(QUERIES * (KEYS + ALIGN)), ds(backward ? p.size() : 0);
  std::vector<int16_t> bits(QUERIES * (KEYS + ALIGN));
  const int64_t per_kv = call.heads / call.kv_heads;
  for (;;) {
    const int64_t turn = __atomic_fetch_add(&call.next, 1, __ATOMIC_RELAXED);
    if (turn >= call.num_units) return;
    const int64_t unit = call.units[turn];
    if (!backward) {
      Head<Real>(call, unit / call.heads, unit % call.heads).forward(p.data(), bits.data());
      continue;
    }
    const int64_t batch = unit / call.kv_heads, first = unit % call.kv_heads * per_kv;
    for (int64_t head = first; head < first + per_kv; ++head)
      Head<Real>(call, batch, head).backward(p.data(), ds.data(), bits.data());
  }
}

}  // namespace

// Work at the call's units until none is left; any number of threads may do so at once.
extern "C" void attention_run(Call* call, int is_double, int backward) {
  const auto set_threads = reinterpret_cast<int (*)(int)>(call->set_threads);
  const int before = set_threads(1);  // of the BLAS, in this thread: products are small, and heads share the cores
  is_double ? run<double>(*call, backward) : run<float>(*call, backward);
  set_threads(before);
}

// Query-key cells that this process has computed so far, forward and backward alike.
extern "C" int64_t attention_cells() { return computed_cells; }
