/* Attention of single queries over the paged pool, read where it lies: one pass for the scores, one for the values.
 *
 * HEAD_DIM and GROUP (query heads a KV head) are constants so that a query group's vectors stay in registers. Strides count
 * floats. Nothing beyond a query's `limit` positions is read. See native.py for the shapes.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define VECTORS (HEAD_DIM / LANES)
typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

static inline float total(vector v)
{
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++)
        sum += v[lane];
    return sum;
}

/* The next block lies far away, where the machine's own prefetching does not look. */
static inline void fetch_ahead(const float *row)
{
    for (int line = 0; line < HEAD_DIM; line += 16)
        __builtin_prefetch(row + line);
}

/* e^x for x <= 0, to 2 ulp (Cephes' expf); a plain function so that loops over it become vector code. NaN stays NaN. */
static inline float exp_not_positive(float x)
{
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } power = { ((int32_t)n + 127) << 23 };
    return p * power.value;
}

static void attend_group(const float *query, float *out, const float *keys, const float *values, int64_t block_stride,
                         int64_t position_stride, int64_t block_size, const int32_t *table, int64_t limit, float scale,
                         float *scores)
{
    vector q[GROUP][VECTORS], accumulated[GROUP][VECTORS];
    float sums[GROUP];
    memset(accumulated, 0, sizeof accumulated);
    for (int g = 0; g < GROUP; g++)
        for (int v = 0; v < VECTORS; v++)
            q[g][v] = *(const vector *)(query + g * HEAD_DIM + v * LANES) * scale;
    for (int64_t first = 0; first < limit; first += block_size) {
        const float *block = keys + table[first / block_size] * block_stride;
        const float *next = first + block_size < limit ? keys + table[first / block_size + 1] * block_stride
                                                       : values + table[0] * block_stride;
        int64_t count = limit - first < block_size ? limit - first : block_size;
        for (int64_t i = 0; i < count; i++) {
            const vector *key = (const vector *)(block + i * position_stride);
            fetch_ahead(next + i * position_stride);
#pragma GCC unroll 16
            for (int g = 0; g < GROUP; g++) {
                vector product = q[g][0] * key[0];
#pragma GCC unroll 16
                for (int v = 1; v < VECTORS; v++)
                    product += q[g][v] * key[v];
                scores[g * limit + first + i] = total(product);
            }
        }
    }
    for (int g = 0; g < GROUP; g++) {
        float *row = scores + g * limit, best = row[0], sum = 0.0f;
        for (int64_t i = 1; i < limit; i++)
            best = row[i] > best ? row[i] : best;
        for (int64_t i = 0; i < limit; i++)
            row[i] = exp_not_positive(row[i] - best);
        for (int64_t i = 0; i < limit; i++)
            sum += row[i];
        sums[g] = sum;
    }
    for (int64_t first = 0; first < limit; first += block_size) {
        const float *block = values + table[first / block_size] * block_stride;
        const float *next = first + block_size < limit ? values + table[first / block_size + 1] * block_stride : block;
        int64_t count = limit - first < block_size ? limit - first : block_size;
        for (int64_t i = 0; i < count; i++) {
            const vector *value = (const vector *)(block + i * position_stride);
            fetch_ahead(next + i * position_stride);
#pragma GCC unroll 16
            for (int g = 0; g < GROUP; g++)
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; v++)
                    accumulated[g][v] += scores[g * limit + first + i] * value[v];
        }
    }
    for (int g = 0; g < GROUP; g++)
        for (int v = 0; v < VECTORS; v++)
            *(vector *)(out + g * HEAD_DIM + v * LANES) = accumulated[g][v] / sums[g];
}

void attend_queries(const float *queries, int64_t query_stride, float *out, int64_t out_stride, const float *keys,
                    const float *values, int64_t block_stride, int64_t head_stride, int64_t position_stride,
                    int64_t block_size, int64_t kv_heads, const int32_t *tables, int64_t table_stride,
                    const int64_t *tokens, const int64_t *rows, const int64_t *limits, int64_t count, float scale,
                    float *scores)
{
    for (int64_t i = 0; i < count; i++)
        for (int64_t head = 0; head < kv_heads; head++)
            attend_group(queries + tokens[i] * query_stride + head * GROUP * HEAD_DIM,
                         out + tokens[i] * out_stride + head * GROUP * HEAD_DIM, keys + head * head_stride,
                         values + head * head_stride, block_stride, position_stride, block_size,
                         tables + rows[i] * table_stride, limits[i], scale, scores);
}
