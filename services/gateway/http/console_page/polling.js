// Asks the gateway for something again and again, as long as it is shown.

import { useEffect, useState } from "./preact.js";
import { refusal } from "./stream.js";

/**
 * The last answer at `path` with when it came, {answer, at} or null, and what went wrong last, or null. `goesOn(answer)`:
 * whether to ask again after `everyMs`; its answer is undefined where there was none.
 */
export function usePolled(path, headers, everyMs, goesOn) {
  const [found, setFound] = useState(null);
  const [trouble, setTrouble] = useState(null);
  useEffect(() => {
    const ending = new AbortController();
    let timer;
    const look = async () => {
      let answer;
      try {
        const response = await fetch(path, { headers, signal: ending.signal, cache: "no-store" });
        if (response.ok) {
          answer = await response.json();
          setFound({ answer, at: Date.now() / 1000 });
        }
        setTrouble(response.ok ? null : await refusal(response));
      } catch {
        if (!ending.signal.aborted) setTrouble("The gateway does not answer.");
      }
      if (!ending.signal.aborted && goesOn(answer)) timer = setTimeout(look, everyMs);
    };
    setFound(null);
    setTrouble(null);
    look();
    return () => {
      clearTimeout(timer);
      ending.abort();
    };
  }, [path, headers.authorization]);
  return [found, trouble];
}
