// Curves of memory over the step, forwards and backwards aligned: their operations differ in number.

/** A curve in so many pieces: bytes, and how many pieces are the forward's. */
function curveOf(data) {
  return { bytes: data.moments.map(({ bytes }) => bytes), forward: data.forwardMoments };
}

/**
 * @param curves gives curves, the first filled: each with `bytes`, `forward`, `name`, `color()`
 */
function curveChart(label, height, curves, budget) {
  return drawing(label, height, (context, width, tall) => {
    const found = curves();
    const most = axisTop(Math.max(1, ...found.map(({ bytes }) => bytes.reduce((a, b) => Math.max(a, b), 0))), budget);
    const top = 20, bottom = tall - 8;
    const plot = { left: 74, right: width - 8, height: bottom - top, y: bytes => bottom - bytes / (most * 1.04) * (bottom - top) };
    drawByteAxis(context, plot, most);
    // A third of the width is the forward's, about its share of the time.
    const middle = plot.left + (plot.right - plot.left) / 3;
    const x = ({ bytes, forward }, at) => at <= forward
      ? plot.left + (forward ? at / forward : 0) * (bytes.length > forward ? middle - plot.left : plot.right - plot.left)
      : middle + (at - forward) / (bytes.length - forward) * (plot.right - middle);
    found.forEach((curve, place) => {
      context.beginPath();
      context.moveTo(plot.left, plot.y(0));
      curve.bytes.forEach((bytes, at) => {
        context.lineTo(x(curve, at), plot.y(bytes));
        context.lineTo(x(curve, at + 1), plot.y(bytes));
      });
      context.lineTo(x(curve, curve.bytes.length), plot.y(0));
      context.globalAlpha = place ? 0 : 0.3;
      context.fillStyle = curve.color();
      context.fill();
      context.globalAlpha = 1;
      context.strokeStyle = curve.color();
      context.lineWidth = 1.5;
      context.lineJoin = "round";
      context.stroke();
    });
    drawBudgetLine(context, plot, budget, most, "right");
    let left = plot.left + 8;
    for (const { name, color } of found) {
      drawLabel(context, `▬ ${name}`, left, 10, color());
      left += context.measureText(`▬ ${name}`).width + 16;
    }
  });
}
