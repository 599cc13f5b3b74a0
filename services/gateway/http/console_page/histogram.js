// Arithmetic on histograms: {bounds, counts, total}, with one more count than bounds.

export function observations(histogram) {
  return histogram.counts.reduce((sum, count) => sum + count, 0);
}

/** What came between two states of a histogram; all of it without an earlier one, or where its gateway began anew. */
export function since(earlier, now) {
  if (!earlier || earlier.counts.length !== now.counts.length) return now;
  const counts = now.counts.map((count, index) => count - earlier.counts[index]);
  if (counts.some((count) => count < 0)) return now;
  return { bounds: now.bounds, counts, total: now.total - earlier.total };
}

/** The value below which a share of the observations lies, in seconds, as if they were even within each bucket. */
export function quantile(histogram, share) {
  const wanted = share * observations(histogram);
  if (wanted === 0) return undefined;
  let before = 0;
  for (const [index, count] of histogram.counts.entries()) {
    if (before + count >= wanted && count > 0) {
      const low = index > 0 ? histogram.bounds[index - 1] : 0;
      const high = histogram.bounds[index];
      return high === undefined ? low : low + ((high - low) * (wanted - before)) / count;
    }
    before += count;
  }
  return histogram.bounds.at(-1);
}

/** The share of the observations that are at most one of the bounds. */
export function within(histogram, bound) {
  const all = observations(histogram);
  if (all === 0) return undefined;
  const fast = histogram.counts.reduce((sum, count, index) => (histogram.bounds[index] <= bound ? sum + count : sum), 0);
  return fast / all;
}

/** First and last bucket with something in it. */
export function range(histogram) {
  const first = histogram.counts.findIndex((count) => count > 0);
  const last = histogram.counts.findLastIndex((count) => count > 0);
  return [first, last];
}
