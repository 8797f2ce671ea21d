"use strict";
for (const pair of document.querySelectorAll(".pair")) {
  const videos = [...pair.querySelectorAll("video")], [first] = videos;
  const button = pair.querySelector("button"), range = pair.querySelector("input");
  const stop = () => { for (const video of videos) video.pause(); button.textContent = "\u25b6"; };
  const follow = () => {
    if (first.paused) return;
    for (const video of videos.slice(1))
      if (Math.abs(video.currentTime - first.currentTime) > .1) video.currentTime = first.currentTime;
    if (first.duration) range.value = first.currentTime / first.duration;
    requestAnimationFrame(follow);
  };
  button.addEventListener("click", async () => {
    if (!first.paused) { stop(); return; }
    button.textContent = "\u23f8";
    await Promise.allSettled(videos.map(video => video.play()));
    follow();
  });
  range.addEventListener("input", () => {
    stop();
    for (const video of videos) if (video.duration) video.currentTime = range.value * video.duration;
  });
  for (const video of videos) {
    const hide = () => pair.querySelectorAll(".videos, .player").forEach(part => part.classList.add("lost"));
    video.addEventListener("error", hide);
    if (video.error) hide();
  }
}
for (const prompt of document.querySelectorAll(".clamp"))
  prompt.addEventListener("click", () => prompt.classList.toggle("whole"));
for (const range of document.querySelectorAll(".updates input")) {
  const updates = range.dataset.updates.split(" ");
  range.addEventListener("input", () => {
    const update = updates[range.value];
    document.querySelector(".chosen").textContent = update;
    for (const shown of document.querySelectorAll(".pair .video:last-child")) {
      const video = shown.querySelector("video");
      const folder = `update-${update.padStart(6, "0")}`;
      video.src = video.getAttribute("src").replace(/update-\d+/, folder);
      shown.querySelector("span").textContent = `update ${update}`;
    }
  });
}
for (const time of document.querySelectorAll("time")) {
  const date = new Date(time.dateTime), say = () => {
    const minutes = Math.round((Date.now() - date) / 60000);
    const ago = minutes < 100 ? `${minutes} min` : `${Math.round(minutes / 60)} h`;
    time.textContent = `${date.toLocaleString()} (${ago} ago)`;
  };
  say(); setInterval(say, 30000);
}
const refresh = Number(document.body.dataset.refresh), key = `sage-fast ${location.pathname}`;
if (refresh) {
  const saved = JSON.parse(sessionStorage.getItem(key) || "null"), folds = [...document.querySelectorAll("details")];
  if (saved) { folds.forEach((fold, i) => { fold.open = Boolean(saved.open[i]); }); scrollTo(0, saved.scroll); }
  setInterval(() => {
    const busy = [...document.querySelectorAll("video")].some(video => !video.paused) || getSelection().toString();
    if (document.hidden || busy) return;
    sessionStorage.setItem(key, JSON.stringify({scroll: scrollY, open: folds.map(fold => fold.open)}));
    location.reload();
  }, 1000 * refresh);
}
