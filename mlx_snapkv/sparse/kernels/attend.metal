  // Attend to a token's items, which are divided into splits. There is one threadgroup per split and KV head. It reads
  // keys and values in place, once for all GROUP query heads of the KV head.
  //
  // Items, in this order: cluster means | chosen entries | sink [0, sink_stop) | window and newest entries
  // [window_start, n). Entries before n_prompt are in `keys` and `values`. Later entries are in `own_keys` and
  // `own_values`.
  //
  // Inputs:
  //   queries                (n_heads, D), with the query heads of a KV head adjacent
  //   keys, values           (n_kv_heads, capacity, D)
  //   own_keys, own_values   (n_kv_heads, capacity, D)
  //   mean_keys, mean_values (n_kv_heads, n_means, D)
  //   unread                 (n_kv_heads, n_means) uint32, number of entries that each mean represents
  //   log_mass, temperature  (n_heads) float32
  //   positions              (n_kv_heads, n_chosen) uint32
  // Outputs, float32:
  //   partial  (n_heads, n_splits, D), weighted sum of values
  //   top      (n_heads, n_splits), largest logit
  //   total    (n_heads, n_splits), sum of weights exp(logit - top)
  constexpr uint TEAM = 8;                         // lanes that share a key
  constexpr uint TEAMS = THREADS / TEAM, EACH = ATTEND_BLOCK / TEAMS;  // EACH: items per team
  constexpr uint COLUMNS = D / 4, PARTS = THREADS / COLUMNS;  // threads per value; values read at once
  constexpr float HIDDEN = -1e30f;                 // finite, because subtracting infinities gives NaN
  threadgroup float query[GROUP * D], weight[GROUP * ATTEND_BLOCK], part_sum[PARTS * D];
  threadgroup float maximum[GROUP], rescale[GROUP], mass[GROUP];  // rescale: factor for earlier sums
  threadgroup uint place[ATTEND_BLOCK];
  const uint tid = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
  const uint simd = simdgroup_index_in_threadgroup, team = tid / TEAM, member = tid % TEAM;
  const uint part = tid / COLUMNS, column = 4 * (tid % COLUMNS);
  const uint split = threadgroup_position_in_grid.x, kv_head = threadgroup_position_in_grid.y;
  const uint n_means = params[0], n_chosen = params[1], sink_stop = params[2], window_start = params[3];
  const uint n = params[4], n_prompt = params[5], n_splits = params[9];
  const ulong head_start = ulong(kv_head) * params[6] * D, own_start = ulong(kv_head) * params[7] * D;
  const ulong means_start = ulong(kv_head) * n_means * D;
  const uint n_items = n_means + n_chosen + sink_stop + (n - window_start);
  const uint first = split * params[8], stop = min(n_items, first + params[8]);
  const float scale = as_type<float>(params[10]);

  for (uint i = tid; i < GROUP * D; i += THREADS) query[i] = float(queries[kv_head * GROUP * D + i]) * scale;
  if (tid < GROUP) { maximum[tid] = HIDDEN; mass[tid] = 0; }
  float sum[GROUP][4];
  UNROLL for (uint g = 0; g < GROUP; g++) { UNROLL for (uint j = 0; j < 4; j++) sum[g][j] = 0; }
  // Address of an item's row in the means, the prompt's buffer or the answer's buffer.
  #define ROW(item, at, of_means, of_prompt, of_answer) ((item) < n_means ? of_means + means_start + ulong(at) * D \
      : (at) < n_prompt ? of_prompt + head_start + ulong(at) * D \
                        : of_answer + own_start + ulong((at) - n_prompt) * D)

  for (uint block = first; block < stop; block += ATTEND_BLOCK) {
    for (uint i = tid; i < ATTEND_BLOCK; i += THREADS) {
      const uint item = min(block + i, stop - 1), at = item - n_means;  // `at` is only used for entries
      place[i] = item < n_means ? item : at < n_chosen ? positions[kv_head * n_chosen + at]
          : at < n_chosen + sink_stop ? at - n_chosen : window_start + (at - n_chosen - sink_stop);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Logits. Each query element is read once for all EACH keys of a team.
    const device T* key[EACH];
    float logit[EACH][GROUP];
    UNROLL for (uint e = 0; e < EACH; e++) {
      const uint i = team * EACH + e;
      key[e] = ROW(min(block + i, stop - 1), place[i], mean_keys, keys, own_keys);
      UNROLL for (uint g = 0; g < GROUP; g++) logit[e][g] = 0;
    }
    for (uint d = 4 * member; d < D; d += 4 * TEAM) {
      float four[EACH][4];
      UNROLL for (uint e = 0; e < EACH; e++) {
        const vec<T, 4> numbers = *(const device vec<T, 4>*)(key[e] + d);
        UNROLL for (uint j = 0; j < 4; j++) four[e][j] = float(numbers[j]);
      }
      UNROLL for (uint g = 0; g < GROUP; g++) {
        UNROLL for (uint j = 0; j < 4; j++) {
          UNROLL for (uint e = 0; e < EACH; e++) logit[e][g] += query[g * D + d + j] * four[e][j];
        }
      }
    }
    UNROLL for (uint e = 0; e < EACH; e++) {
      const uint i = team * EACH + e, item = block + i;
      UNROLL for (uint g = 0; g < GROUP; g++) {
        float x = logit[e][g];
        UNROLL for (uint other = 1; other < TEAM; other *= 2) x += simd_shuffle_xor(x, other);
        if (member == g % TEAM) {  // the members share the work
          const uint head = kv_head * GROUP + g, left = item < n_means ? unread[kv_head * n_means + item] : 0;
          if (item < n_means) x = left > 0 ? x * temperature[head] + log(float(left)) + log_mass[head] : HIDDEN;
          weight[g * ATTEND_BLOCK + i] = item < stop ? x : HIDDEN;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Weights. A SIMD group takes one query head at a time.
    for (uint g = simd; g < GROUP; g += THREADS / 32) {
      const float before = maximum[g];
      float after = before, total_weight = 0;
      for (uint i = lane; i < ATTEND_BLOCK; i += 32) after = max(after, weight[g * ATTEND_BLOCK + i]);
      after = simd_max(after);
      for (uint i = lane; i < ATTEND_BLOCK; i += 32) {
        const float w = exp(weight[g * ATTEND_BLOCK + i] - after);
        weight[g * ATTEND_BLOCK + i] = w;
        total_weight += w;
      }
      total_weight = simd_sum(total_weight);
      if (lane == 0) {
        maximum[g] = after;
        rescale[g] = exp(before - after);
        mass[g] = mass[g] * rescale[g] + total_weight;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Values. Neighbouring threads read neighbouring elements of a row.
    if (part < PARTS) {
      UNROLL for (uint g = 0; g < GROUP; g++) { UNROLL for (uint j = 0; j < 4; j++) sum[g][j] *= rescale[g]; }
      for (uint i = part; i < min(uint(ATTEND_BLOCK), stop - block); i += PARTS) {
        const device T* value = ROW(block + i, place[i], mean_values, values, own_values);
        const vec<T, 4> numbers = *(const device vec<T, 4>*)(value + column);
        UNROLL for (uint g = 0; g < GROUP; g++) {
          UNROLL for (uint j = 0; j < 4; j++) sum[g][j] += weight[g * ATTEND_BLOCK + i] * float(numbers[j]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Add up the parts' sums, one query head at a time, so that they fit in threadgroup memory for every D.
  UNROLL for (uint g = 0; g < GROUP; g++) {
    const uint row = (kv_head * GROUP + g) * n_splits + split;
    if (part < PARTS) { UNROLL for (uint j = 0; j < 4; j++) part_sum[part * D + column + j] = sum[g][j]; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = tid; d < D; d += THREADS) {
      float all_parts = 0;
      for (uint p = 0; p < PARTS; p++) all_parts += part_sum[p * D + d];
      partial[row * D + d] = all_parts;
    }
    if (tid == 0) { top[row] = maximum[g]; total[row] = mass[g]; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  #undef ROW
