// Records what is said, and has it written down by a model that hears.

import { html, useEffect, useRef, useState } from "./preact.js";
import { refusal } from "./stream.js";

const LONGEST_MS = 300_000;

/** A button that records until it is pressed again, or five minutes; `onText` gets what was said, `onTrouble` why that is not known. */
export function Microphone({ model, headers, onText, onTrouble }) {
  const [state, setState] = useState("ready");
  const recorder = useRef(null);
  const stop = () => recorder.current?.state === "recording" && recorder.current.stop();
  useEffect(() => stop, []);

  const record = async () => {
    try {
      if (!navigator.mediaDevices) throw new Error("Browsers record only on pages by HTTPS, or of this machine.");
      const heard = await navigator.mediaDevices.getUserMedia({ audio: true });
      const pieces = [];
      const own = (recorder.current = new MediaRecorder(heard));
      const timer = setTimeout(stop, LONGEST_MS);
      own.ondataavailable = ({ data }) => pieces.push(data);
      own.onstop = async () => {
        clearTimeout(timer);
        heard.getTracks().forEach((track) => track.stop());
        setState("writing");
        try {
          onText(await written(new Blob(pieces, { type: own.mimeType }), model, headers));
        } catch (error) {
          onTrouble(error.message);
        }
        setState("ready");
      };
      own.start();
      setState("recording");
    } catch (error) {
      onTrouble(`The microphone cannot be used: ${error.message}`);
    }
  };

  if (state === "recording") return html`<button type="button" class="danger" onClick=${stop}>Stop recording</button>`;
  return html`<button type="button" class="quiet" disabled=${state === "writing"} onClick=${record}>${state === "writing" ? "Writing down …" : "Record"}</button>`;
}

/** What is said in a recording. Raises an Error that says why that is not known. */
async function written(recording, model, headers) {
  const form = new FormData();
  form.append("model", model);
  form.append("file", recording, recording.type.includes("mp4") ? "recording.mp4" : "recording.webm");
  const response = await fetch("v1/audio/transcriptions", { method: "POST", headers, body: form });
  if (!response.ok) throw new Error(await refusal(response));
  return (await response.json()).text.trim();
}
