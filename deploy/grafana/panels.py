"""Grafana's JSON for the few kinds of panels and variables that the dashboard has. What they show: make_dashboard.py."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
CLASSIC = {"mode": "palette-classic"}


def steps(*values):
    """thresholds(("green", None), ("red", 1)): green below 1."""
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in values]}


def targets(queries, **more):
    """queries: (expression, legend) each."""
    return [{"datasource": DATASOURCE, "editorMode": "code", "expr": " ".join(expression.split()), "legendFormat": legend,
             "range": True, "refId": chr(ord("A") + i), **more} for i, (expression, legend) in enumerate(queries)]


def panel(kind, title, description, queries, width, height, defaults, options, overrides=(), **more):
    return {
        "type": kind, "title": title, "description": description, "datasource": DATASOURCE,
        "gridPos": {"h": height, "w": width, "x": 0, "y": 0},
        "fieldConfig": {"defaults": defaults, "overrides": list(overrides)}, "options": options,
        "targets": queries if queries and isinstance(queries[0], dict) else targets(queries), **more}


def timeseries(title, description, queries, unit="short", width=8, height=8, stack=None, log=False, low=None, high=None,
               thresholds=None, stairs=False, points=False):
    """stack: "normal" or "percent". thresholds are drawn as lines."""
    custom = {
        "drawStyle": "line", "lineInterpolation": "stepAfter" if stairs else "linear", "lineWidth": 1,
        "fillOpacity": 40 if stack else 5, "showPoints": "always" if points else "never", "pointSize": 5, "spanNulls": False,
        "stacking": {"mode": stack or "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": 10} if log else {"type": "linear"},
        "thresholdsStyle": {"mode": "line" if thresholds else "off"},
    }
    defaults = {"unit": unit, "color": CLASSIC, "custom": custom, "mappings": []}
    if low is not None:
        defaults["min"] = low
    if high is not None:
        defaults["max"] = high
    if thresholds:
        defaults["thresholds"] = thresholds
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel("timeseries", title, description, queries, width, height, defaults, options)


def stat(title, description, expression, unit="short", width=3, thresholds=None, legend="", decimals=None):
    defaults = {"unit": unit, "color": {"mode": "thresholds"}, "mappings": [],
                "thresholds": thresholds or steps(("blue", None))}
    if decimals is not None:
        defaults["decimals"] = decimals
    options = {
        "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "orientation": "auto", "textMode": "auto",
        "wideLayout": True, "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return panel("stat", title, description, [(expression, legend)], width, 4, defaults, options)


def heatmap(title, description, expression, unit="none", width=8, height=9):
    options = {
        "calculate": False, "cellGap": 1, "cellValues": {},
        "color": {"mode": "scheme", "scheme": "Blues", "fill": "dark-blue", "scale": "exponential", "exponent": 0.5,
                  "steps": 64, "reverse": False},
        "exemplars": {"color": "rgba(255,0,255,0.7)"}, "filterValues": {"le": 1e-9}, "legend": {"show": True},
        "rowsFrame": {"layout": "auto"}, "showValue": "never", "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
    }
    defaults = {"custom": {"scaleDistribution": {"type": "linear"}, "hideFrom": {"legend": False, "tooltip": False, "viz": False}}}
    return panel("heatmap", title, description, targets([(expression, "{{le}}")], format="heatmap"), width, height,
                 defaults, options)


def mapped(values):
    """Value mappings: {value: (text, color)}."""
    return [{"type": "value", "options": {str(value): {"text": text, "color": color, "index": i}
                                          for i, (value, (text, color)) in enumerate(values.items())}}]


def state_timeline(title, description, expression, legend, values, width=24, height=9):
    defaults = {
        "color": {"mode": "thresholds"}, "mappings": mapped(values), "thresholds": steps(("text", None)),
        "custom": {"fillOpacity": 80, "lineWidth": 0},
    }
    options = {
        "mergeValues": True, "showValue": "auto", "alignValue": "left", "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return panel("state-timeline", title, description, [(expression, legend)], width, height, defaults, options)


def table(title, description, columns, hidden, width=24, height=8, order=()):
    """columns: (heading, expression, unit, mappings or None) each; rows with equal labels become one.

    hidden: labels that are not shown. order: labels first, in this order.
    """
    queries = targets([(expression, "") for _, expression, _, _ in columns], format="table", instant=True)
    for query in queries:
        query["range"] = False
    one = len(columns) == 1
    value = lambda i: "Value" if one else f"Value #{queries[i]['refId']}"
    names = {value(i): heading for i, (heading, _, _, _) in enumerate(columns)}
    overrides = []
    for heading, _, unit, mappings in columns:
        properties = [{"id": "unit", "value": unit}]
        if mappings:
            properties += [{"id": "mappings", "value": mapped(mappings)},
                           {"id": "custom.cellOptions", "value": {"type": "color-text"}}]
        overrides.append({"matcher": {"id": "byName", "options": heading}, "properties": properties})
    hide = {name: True for name in ("Time", "__name__", *hidden)}
    transformations = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": hide, "renameByName": names,
                                       "indexByName": {label: i for i, label in enumerate(order)}}},
    ]
    defaults = {"custom": {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True}, "mappings": [],
                "thresholds": steps(("text", None))}
    options = {"showHeader": True, "cellHeight": "sm",
               "footer": {"show": False, "reducer": ["sum"], "countRows": False, "fields": ""}}
    return panel("table", title, description, queries, width, height, defaults, options, overrides,
                 transformations=transformations)


def text(content, height=3):
    return {"type": "text", "title": "", "transparent": True, "gridPos": {"h": height, "w": 24, "x": 0, "y": 0},
            "options": {"mode": "markdown", "content": content}}


def row(title, panels, collapsed=False):
    return {"title": title, "panels": panels, "collapsed": collapsed}


def lay_out(rows):
    """Numbers the panels and places them from left to right, row after row."""
    result, y, number = [], 0, 0
    for one in rows:
        number += 1
        head = {"type": "row", "id": number, "title": one["title"], "collapsed": one["collapsed"], "panels": [],
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}}
        result.append(head)
        y, x, line = y + 1, 0, 0
        for each in one["panels"]:
            number += 1
            place = each["gridPos"]
            if x + place["w"] > 24:
                x, y, line = 0, y + line, 0
            each = {"id": number, **each, "gridPos": {**place, "x": x, "y": y}}
            x, line = x + place["w"], max(line, place["h"])
            (head["panels"] if one["collapsed"] else result).append(each)
        y += line
    return result


def datasource_variable():
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0,
            "includeAll": False, "multi": False, "refresh": 1, "regex": "", "skipUrlSync": False, "options": [],
            "current": {}}


def label_variable(name, label, metric, of=None):
    """Values of a label, all of them chosen; in a query write =~"$name"."""
    query = f"label_values({metric}, {of or name})"
    return {"name": name, "label": label, "type": "query", "datasource": DATASOURCE,
            "query": {"query": query, "refId": f"variable-{name}"}, "refresh": 2, "regex": "", "sort": 3, "hide": 0,
            "includeAll": True, "multi": True, "skipUrlSync": False, "options": [],
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}


def choice_variable(name, label, values, chosen):
    options = [{"selected": value == chosen, "text": value, "value": value} for value in values]
    return {"name": name, "label": label, "type": "custom", "query": ",".join(values), "hide": 0, "includeAll": False,
            "multi": False, "skipUrlSync": False, "options": options,
            "current": {"selected": True, "text": chosen, "value": chosen}}


def dashboard(uid, title, description, tags, variables, rows):
    return {
        "uid": uid, "title": title, "description": description, "tags": tags, "editable": True, "graphTooltip": 1,
        "schemaVersion": 39, "timezone": "browser", "refresh": "30s", "fiscalYearStartMonth": 0,
        "time": {"from": "now-6h", "to": "now"}, "timepicker": {}, "links": [], "annotations": {"list": []},
        "templating": {"list": variables}, "panels": lay_out(rows),
    }
